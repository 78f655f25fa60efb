"""A conversation with a policy and its tools, where a person may act as user, model or tool.

Token ids are the truth here too: what the model sampled is kept with its log-probabilities, what a person wrote in its
place is FORCED and never trained, and everything else is appended as the chat template's delta. Not here: how a person
says what they want (server/chat.py), how it looks (tui/).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentrl_cli.chat.render import Chat, Rendered
from agentrl_cli.env import AssistantTurn, ToolEnv
from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.policies.base import Policy
from agentrl_cli.rewards import Reward, RewardContext, score
from agentrl_cli.rollout import seed_of
from agentrl_cli.types import (
    Episode,
    Generation,
    Message,
    Origin,
    Outcome,
    RewardPart,
    Sampling,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
    new_id,
)
from agentrl_cli.whatif import Rerun, beginning, rerun_calls

if TYPE_CHECKING:
    from agentrl_cli.store import Store

Emit = Callable[[dict[str, Any]], None]
Approve = Callable[[tuple[ToolCall, ...]], Awaitable["Answer"]]
SETTINGS = ("max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p")
"""What a chat may change of its sampling."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a person decided about tool calls: run them, refuse them, or answer in the tool's place."""

    run: bool = True
    text: str | None = None


@dataclass
class Session:
    """One conversation. `emit` gets an event for every turn, token and result; `approve` is asked before tools run."""

    policy: Policy
    chat: Chat
    env: ToolEnv
    emit: Emit
    task: Task
    rewards: Sequence[Reward] = ()
    approve: Approve | None = None
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=256))
    max_turns: int = 8
    most: int = 0
    """Tokens of the whole conversation at most; 0: as many as the policy's context holds."""
    sandboxed: bool = False
    id: str = field(default_factory=new_id)
    parent: Episode | None = None
    """The episode that this one goes on from, after `resume`."""
    kind: str = "chat"
    sample: int = 0
    group_id: str | None = None
    turns: list[Turn] = field(default_factory=list)
    parts: list[Tokens] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reward_parts: tuple[RewardPart, ...] = ()
    _marks: list[int] = field(default_factory=list)
    _tries: int = 0
    _opening: list[Message] = field(default_factory=list)
    started: float = field(default_factory=time.time)

    # -- acting ---------------------------------------------------------------------------------------------------

    async def begin(self, prompt: Sequence[Message]) -> None:
        """Prepares the tools. `prompt` opens the conversation; where it ends with a user message the model answers."""
        await self.env.reset(self.task)
        self._opening = list(prompt)
        if prompt and prompt[-1].get("role") == "user":
            self._opening = []
            self._open(list(prompt))
            await self.reply()

    async def resume(self, episode: Episode, turn: int, *, there: bool = False) -> list[Rerun]:
        """Begins with the turns of a stored episode before turn `turn`; its tool calls are run again for their effects.

        Token ids are the stored ones. `there`: the world is in that state already, and nothing is run.
        Raises UsageError where the model is not to speak there.
        """
        if not there:
            await self.env.reset(self.task)
        self.turns, self.parts = beginning(episode, turn)
        self.messages = [message for item in self.turns for message in item.messages]
        self.parent = episode
        reruns = [] if there else await rerun_calls(episode, self.env, until=turn)
        for item, part in zip(self.turns, self.parts, strict=True):
            self.emit({"ev": "turn", "turn": item, "tokens": part})
        return reruns

    async def user(self, text: str) -> None:
        """A user message, then the model's answer, tools and all."""
        if self.turns and not self._waits_for_world:
            raise UsageError("It is the model's turn.", hint="/retry lets it answer, /as-model answers in its place.")
        self._marks.append(len(self.turns))
        message: Message = {"role": "user", "content": text}
        if not self.turns:
            self._open([*self._opening, message])
        else:
            self._extend([message])
        await self.reply()

    async def reply(self) -> None:
        """Lets the model speak until it calls no tool, or `max_turns` is reached."""
        for _ in range(self.max_turns):
            generation = await self._sample()
            parsed = self._said(generation)
            if not parsed.calls or not await self._run_tools(parsed):
                return
        self.emit({"ev": "note", "text": f"stopped after {self.max_turns} turns; say something to go on"})

    async def as_model(self, text: str) -> None:
        """The person writes the assistant turn; its calls are run, then the model goes on."""
        if self._waits_for_world:
            await self._back_to("user")  # the model has answered already: in its place
        if not self.turns:
            raise UsageError("It is the user's turn.", hint="Say something first.")
        self._marks.append(len(self.turns))
        ids = self.chat.assistant_ids(text, self.env.schemas)
        tokens = Tokens.given(ids, [Origin.FORCED] * len(ids))
        parsed = self.chat.parse(ids, self.env.schemas, turn=self._answers)
        self._turn("assistant", (parsed.message,), tokens, calls=parsed.calls, stop_reason=StopReason.STOP)
        self.messages.append(parsed.message)
        if parsed.calls and await self._run_tools(AssistantTurn(parsed.content, parsed.calls, self._answers)):
            await self.reply()

    async def as_tool(self, text: str) -> None:
        """The person answers the calls of the last assistant turn, then the model goes on."""
        await self._back_to("assistant", calls=True)
        last = self.turns[-1] if self.turns else None
        if last is None or last.role != "assistant" or not last.calls:
            raise UsageError("No tool call waits for an answer.", hint="/undo goes back to one; --approve asks first.")
        self._marks.append(len(self.turns))
        self._observe(last.calls, tuple(ToolResult(text) for _ in last.calls))
        await self.reply()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool by hand, in the state that the conversation left; the model does not see it."""
        if name not in self.env.tools:
            raise NotFound.of("tool", name, self.env.tools)
        step = await self.env.step(AssistantTurn("", (ToolCall("by_hand", name, arguments, ""),), self._answers))
        return step.results[0]

    async def retry(self) -> None:
        """Takes the model's last answer back and lets it answer again, with another seed.

        Where it is the model's turn already, after `resume` for instance, nothing is taken back.
        """
        if self.turns and not self._waits_for_world:
            self._tries += 1
            self._marks.append(len(self.turns))
            await self.reply()
            return
        keep = len(self.turns)
        while keep and self.turns[keep - 1].role != "user":
            keep -= 1
        if not keep:
            raise UsageError("There is nothing to answer yet.")
        await self._cut(keep)
        self._tries += 1
        await self.reply()

    async def undo(self) -> int:
        """Takes back everything since the last thing the person did; returns the number of turns left.

        The world goes back, too; what a tool did outside the sandbox stays done, and a note says so.
        """
        if not self._marks:
            raise UsageError("There is nothing to take back.")
        await self._cut(self._marks.pop())
        return len(self.turns)

    async def score(self) -> tuple[RewardPart, ...]:
        """The pack's reward parts for the conversation so far. Raises UsageError without a task."""
        if not self.task.data or not self.rewards:
            raise UsageError("There is nothing to score by: this chat has no task.", hint="`agentrl chat --task ID`.")
        said = [turn.messages[0].get("content") or "" for turn in self.turns if turn.role == "assistant"]
        session = self.env.context.session if self.sandboxed else None
        state, plain = self.env.context.state, self.chat.tokenizer.plain
        context = RewardContext(self.task, said[-1] if said else "", session, state, decode=plain)
        self.reward_parts = await score(self.episode(), self.rewards, context)
        return self.reward_parts

    def give(self, value: float) -> tuple[RewardPart, ...]:
        """The person's own score, the primary part."""
        self.reward_parts = (RewardPart("person", value, 1.0, primary=True, detail="given in chat"),)
        return self.reward_parts

    def save(self, store: Store) -> str:
        """Stores the conversation as an episode of kind `chat`; saving again replaces it. Returns its id."""
        tokenizer = self.chat.tokenizer
        store.put_tokenizer(tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", dict(tokenizer.specials))
        episode = self.episode()
        primary = episode.primary
        outcome = Outcome.CANCELLED if primary is None else Outcome.SOLVED if primary >= 1 else Outcome.FAILED
        error = "a chat that nobody scored" if primary is None else ""
        store.finish_episode(
            episode.with_(outcome=outcome, error=error, ended=time.time()), split="chat", tokenizer=tokenizer.hash
        )
        return self.id

    def episode(self) -> Episode:
        """The conversation so far as an episode, a child of the one it went on from."""
        parent = self.parent
        return Episode(
            id=self.id,
            run_id=parent.run_id if parent is not None else None,
            step=parent.step if parent is not None else None,
            parent_id=parent.id if parent is not None else None,
            parent_turn=self.branch,
            sample=self.sample,
            group_id=self.group_id,
            task_id=self.task.id,
            pack=self.task.pack,
            family=self.task.family,
            kind=self.kind,
            seed=self.sampling.seed,
            weights_version=self.policy.weights_version,
            turns=tuple(self.turns),
            tokens=Tokens.concat(self.parts),
            reward_parts=self.reward_parts,
            started=self.started,
        )

    async def close(self) -> None:
        """Forgets the policy's state of it, releases the tools."""
        await self.policy.release(self.id)
        await self.env.close()

    # -- pieces ---------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[int]:
        """The whole context."""
        return [int(token) for part in self.parts for token in part.ids]

    @property
    def branch(self) -> int | None:
        """The first turn that is not the parent's."""
        if self.parent is None:
            return None
        old = self.parent.turns
        return next((n for n, turn in enumerate(self.turns) if n >= len(old) or turn is not old[n]), len(self.turns))

    @property
    def _answers(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def _waits_for_world(self) -> bool:
        """True where the last turn is the assistant's, so that user or tool may speak."""
        return bool(self.turns) and self.turns[-1].role == "assistant"

    def _open(self, messages: list[Message]) -> None:
        self.messages = messages
        self._append(self.chat.prompt(messages, self.env.schemas), messages)

    def _extend(self, messages: list[Message], results: tuple[ToolResult, ...] = ()) -> None:
        delta = self.chat.extend(self.messages, messages, self.env.schemas, last_id=self.ids[-1])
        self.messages = [*self.messages, *messages]
        self._append(delta, messages, results)

    def _append(self, rendered: Rendered, messages: Sequence[Message], results: tuple[ToolResult, ...] = ()) -> None:
        left = list(messages)
        for role, start, end in rendered.spans:
            count = next((n for n, message in enumerate(left) if message["role"] != role), len(left))
            own, left = tuple(left[:count]), left[count:]
            tokens = Tokens.given(rendered.ids[start:end], rendered.origin[start:end])
            self._turn(role, own, tokens, results=results if role == "tool" else ())

    async def _sample(self) -> Generation:
        ids = self.ids
        most = min(self.most or self.policy.context_length, self.policy.context_length)
        room = min(self.sampling.max_new_tokens, most - len(ids))
        if room < 1:
            raise UsageError("The context is full.", hint="/undo makes room; /save keeps what there is.")
        seed = seed_of(self.sampling.seed, self._answers, self._tries)
        sampling = replace(self.sampling, max_new_tokens=room, stop_ids=self.chat.stop_ids, seed=seed)
        loop = asyncio.get_running_loop()

        def heard(token: int) -> None:  # may come from the policy's thread
            loop.call_soon_threadsafe(self.emit, {"ev": "token", "id": token})

        generation = await self.policy.generate(self.id, ids, sampling, on_token=heard)
        await asyncio.sleep(0)  # tokens that were heard are told before the turn they make
        return generation

    def _said(self, generation: Generation) -> AssistantTurn:
        number = self._answers
        parsed = self.chat.parse(generation.ids.tolist(), self.env.schemas, turn=number)
        closing = self.chat.close_turn(generation.stop_reason, generation.ids.tolist())
        tokens = Tokens.concat([Tokens.sampled(generation), Tokens.given(closing, [Origin.FORCED] * len(closing))])
        self._turn(
            "assistant",
            (parsed.message,),
            tokens,
            calls=parsed.calls,
            stop_reason=generation.stop_reason,
            weights_version=generation.weights_version,
            seconds=generation.seconds,
        )
        self.messages = [*self.messages, parsed.message]
        return AssistantTurn(parsed.content, parsed.calls, number)

    async def _run_tools(self, turn: AssistantTurn) -> bool:
        """Runs, refuses or answers the calls of a turn; True where the model should go on."""
        answer = await self.approve(turn.calls) if self.approve is not None else Answer()
        if answer.text is not None:
            self._observe(turn.calls, tuple(ToolResult(answer.text) for _ in turn.calls))
            return True
        if not answer.run:
            return False
        step = await self.env.step(turn)
        self._observe(turn.calls, step.results)
        return not step.terminated

    def _observe(self, calls: Sequence[ToolCall], results: tuple[ToolResult, ...]) -> None:
        messages: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]
        self._extend(messages, results)

    def _turn(self, role: str, messages: tuple[Message, ...], tokens: Tokens, **facts: Any) -> None:
        start = sum(len(part) for part in self.parts)
        turn = Turn(len(self.turns), role, messages, start, start + len(tokens), started=time.time(), **facts)
        self.turns.append(turn)
        self.parts.append(tokens)
        self.reward_parts = ()
        self.emit({"ev": "turn", "turn": turn, "tokens": tokens})

    async def _back_to(self, role: str, *, calls: bool = False) -> None:
        """Drops what came after the last turn of a role (with calls); without such a turn nothing is dropped."""
        fits = [n for n, turn in enumerate(self.turns) if turn.role == role and (turn.calls or not calls)]
        if fits and fits[-1] + 1 < len(self.turns):
            await self._cut(fits[-1] + 1)

    async def _cut(self, keep: int) -> None:
        """Drops all turns from `keep` on; the messages follow from the turns, and the world goes back with them."""
        self.turns, self.parts = self.turns[:keep], self.parts[:keep]
        self.messages = [message for turn in self.turns for message in turn.messages]
        self._marks = [mark for mark in self._marks if mark < keep]
        self.reward_parts = ()
        self.emit({"ev": "cut", "turns": keep})
        unanswered = bool(self.turns) and self.turns[-1].role == "assistant" and bool(self.turns[-1].calls)
        for note in await self.env.back(self._answers - unanswered):
            self.emit({"ev": "note", "text": note})
