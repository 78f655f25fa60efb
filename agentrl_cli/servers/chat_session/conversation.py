"""The state of a conversation: its turns, their tokens, its environment; and how each is appended.

Token ids are the truth here too: sampled tokens keep their log-probabilities, text that the user wrote in the model's
place is FORCED and never trained, and everything else is appended as the chat template's delta. The user's actions
are in session.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl_cli.analysis.whatif import ReplayResult, opened, rerun_calls, results_of, step_of
from agentrl_cli.chat.images import pictured
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.rendered import Rendered
from agentrl_cli.chat.tool_choice import forced_text
from agentrl_cli.envs.tool_env import AssistantTurn, Env, Step
from agentrl_cli.errors import UsageError
from agentrl_cli.policies.protocols import MessagePolicy, Policy
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout import seed_of
from agentrl_cli.types import (
    Episode,
    Generation,
    Message,
    Origin,
    RewardPart,
    Sampling,
    Task,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
    new_id,
)

Emit = Callable[[dict[str, Any]], None]
Approve = Callable[[tuple[ToolCall, ...]], Awaitable["Answer"]]
"""Called once per tool call with the turn's remaining calls, that one first."""
REFUSED = "Not run: the person refused this call."


@dataclass(frozen=True, slots=True)
class Answer:
    """The user's decision about tool calls: run them, refuse them, or answer in the tool's place."""

    run: bool = True
    text: str | None = None
    rest: bool = False
    """Whether the decision also applies to the turn's other calls."""


@dataclass
class Conversation:
    """One conversation. `emit` gets an event for each turn, token and result; `approve` is called before tools run."""

    policy: Policy
    chat: Chat
    env: Env
    emit: Emit
    task: Task
    rewards: Sequence[Reward] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    """Configured weights of reward parts; they override the pack's."""
    folder: Path | None = None  # the pack's: paths of images are relative to it
    agent: str = ""
    """The agent that makes the pack's episodes, which a conversation does not run; empty if it has none."""
    remake: Callable[[], Env] | None = None
    """Makes a new environment if the current one cannot roll back."""
    simulate: bool = True  # whether the environment answers turns without a call
    approve: Approve | None = None
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=256))
    max_turns: int = 8
    most: int = 0
    """Maximum tokens of the conversation; 0: the policy's context length."""
    sandboxed: bool = False
    id: str = field(default_factory=new_id)
    parent: Episode | None = None
    """The episode that this one continues, after `resume`."""
    places: tuple[int, ...] = ()
    """After `resume` the index of each of the parent's turns in the stored episode: others where that branches."""
    kind: str = "chat"
    sample: int = 0
    group_id: str | None = None
    turns: list[Turn] = field(default_factory=list)
    parts: list[Tokens] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reward_parts: tuple[RewardPart, ...] = ()
    by_hand: list[tuple[int, str]] = field(default_factory=list)
    """(turns before it, text) of the user's own calls; the model sees none of them."""
    over: bool = False
    """True if the environment ended the conversation."""
    _earned: list[tuple[int, float]] = field(default_factory=list)
    """(index of the answered turn, reward) of the environment's steps."""
    _marks: list[int] = field(default_factory=list)
    _tries: int = 0
    _opening: list[Message] = field(default_factory=list)
    started: float = field(default_factory=time.time)

    def episode(self) -> Episode:
        """Return the conversation so far as an episode, a child of the one it continues."""
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
        """Releases the policy's state of the conversation, and the tools."""
        await self.policy.release(self.id)
        await self.env.close()

    # -- pieces ---------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[int]:
        """The whole context."""
        return [int(token) for part in self.parts for token in part.ids]

    @property
    def earned(self) -> float | None:
        """Sum of the environment's step rewards; None if there were none."""
        return sum(reward for _, reward in self._earned) if self._earned else None

    @property
    def branch(self) -> int | None:
        """The first turn that is not the parent's, as an index of the stored episode."""
        if self.parent is None:
            return None
        old = self.parent.turns
        own = next(
            (n for n, turn in enumerate(self.turns) if n >= len(old) or turn is not old[n]),
            len(self.turns),
        )
        return (
            self.places[own]
            if own < len(self.places)
            else max(self.places, default=-1) + 1 + own - len(self.places)
        )

    @property
    def _answers(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def _last_answer(self) -> AssistantTurn:
        """The last turn, which must be the assistant's."""
        last = self.turns[-1]
        content = str(last.messages[0].get("content") or "") if last.messages else ""
        return AssistantTurn(content, last.calls, self._answers - 1)

    def _extend(
        self,
        messages: list[Message],
        results: tuple[ToolResult, ...] = (),
        reward: float | None = None,
    ) -> None:
        in_results = self.chat.images is None or self.chat.shows_images
        messages, images = pictured(
            messages, results, self.chat.images, self.folder, in_results=in_results
        )
        delta = self.chat.extend(self.messages, messages, self.env.schemas, last_id=self.ids[-1])
        self.messages = [*self.messages, *messages]
        self._append(delta, messages, results, reward, images)

    def _append(
        self,
        rendered: Rendered,
        messages: Sequence[Message],
        results: tuple[ToolResult, ...] = (),
        reward: float | None = None,
        images: tuple[bytes, ...] = (),
    ) -> None:
        for role, own, tokens, pixels in rendered.with_images(messages, images):
            facts: dict[str, Any] = {"results": results} if role == "tool" else {"images": pixels}
            self._turn(role, own, tokens, **facts, reward=reward if role == "user" else None)

    async def _sample(self) -> tuple[Generation, list[int]]:
        """Return the model's generation, and the ids that the task's `tool_choice` forced at its start."""
        choice = self.task.data.get("tool_choice") if not self._answers else None
        forced = (
            self.chat.tokenizer.encode(forced_text(self.chat, self.env.schemas, choice))
            if choice
            else []
        )
        ids = [*self.ids, *forced]
        most = min(self.most or self.policy.context_length, self.policy.context_length)
        room = min(self.sampling.max_new_tokens, most - len(ids))
        if room < 1:
            raise UsageError(
                "The context is full.", hint="/undo makes room; /save stores the chat so far."
            )
        seed = seed_of(self.sampling.seed, self._answers, self._tries)
        sampling = replace(
            self.sampling, max_new_tokens=room, stop_ids=self.chat.stop_ids, seed=seed
        )
        loop = asyncio.get_running_loop()

        def on_token(token: int) -> None:  # may come from the policy's thread
            loop.call_soon_threadsafe(self.emit, {"ev": "token", "id": token})

        if isinstance(self.policy, MessagePolicy):
            self.policy.observe(self.id, self.messages, self.env.schemas)
        images = self.episode().images
        generation = await self.policy.generate(
            self.id, ids, sampling, on_token=on_token, images=images
        )
        await asyncio.sleep(0)  # the tokens are reported before the turn that they make
        return generation, forced

    def _append_answer(self, generation: Generation, forced: Sequence[int] = ()) -> AssistantTurn:
        number = self._answers
        parsed = self.chat.parse([*forced, *generation.ids.tolist()], self.env.schemas, turn=number)
        closing = self.chat.close_turn(generation.stop_reason, generation.ids.tolist())
        given = [Tokens.given(ids, [Origin.FORCED] * len(ids)) for ids in (forced, closing)]
        tokens = Tokens.concat([given[0], Tokens.sampled(generation), given[1]])
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
        """Runs, refuses or answers a turn's calls one by one; True if the model should continue."""
        answers = await _decisions(self.approve, turn.calls)
        if all(answer.run for answer in answers):
            return await self._environment_answers(turn)
        if not any(answer.run or answer.text is not None for answer in answers):
            self.emit(
                {
                    "ev": "note",
                    "text": "not run: /as-tool TEXT answers in the tool's place, /undo removes it",
                }
            )
            return False
        chosen = tuple(call for call, answer in zip(turn.calls, answers, strict=True) if answer.run)
        step = await step_of(self.env, replace(turn, calls=chosen)) if chosen else Step()
        given = iter(results_of(step))
        results = tuple(
            next(given, ToolResult("")) if answer.run else _in_place(answer) for answer in answers
        )
        self._answer(turn.calls, results, heard=not chosen)
        return not step.terminated

    async def _environment_answers(self, turn: AssistantTurn) -> bool:
        """Appends the environment's answer to a turn; True if the model should continue."""
        step = await step_of(self.env, turn)
        self.over = step.terminated or not step.messages
        if step.reward is not None:
            self._earned.append((turn.index, step.reward))
        if step.messages:
            self._extend(list(step.messages), results_of(step) if turn.calls else (), step.reward)
        if self.over and not turn.calls:
            self.emit(
                {"ev": "note", "text": "the environment ended the conversation: /reward scores it"}
            )
        return not self.over and not step.truncated

    def _answer(
        self, calls: Sequence[ToolCall], results: tuple[ToolResult, ...], *, heard: bool = True
    ) -> None:
        """Appends results in the tools' place. `heard`: the environment made none of them and is notified."""
        messages: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]
        if heard:
            self.env.heard(self._last_answer, messages)
        self._extend(messages, results)

    def _turn(self, role: str, messages: tuple[Message, ...], tokens: Tokens, **facts: Any) -> None:
        start = sum(len(part) for part in self.parts)
        turn = Turn(
            len(self.turns),
            role,
            messages,
            start,
            start + len(tokens),
            started=time.time(),
            **facts,
        )
        self.turns.append(turn)
        self.parts.append(tokens)
        self.reward_parts = ()
        self.emit({"ev": "turn", "turn": turn, "tokens": tokens})

    async def _cut(self, keep: int) -> None:
        """Drops all turns from `keep` on, their messages too, and rolls the environment back."""
        self.turns, self.parts = self.turns[:keep], self.parts[:keep]
        self.messages = [message for turn in self.turns for message in turn.messages]
        self._marks = [mark for mark in self._marks if mark < keep]
        self.by_hand = [
            (turns, text) for turns, text in self.by_hand if turns <= keep
        ]  # rolled back, too
        self.reward_parts = ()
        self.emit({"ev": "cut", "turns": keep})
        last = self.turns[-1] if self.turns else None
        unanswered = (
            last is not None and last.role == "assistant" and (bool(last.calls) or self.env.talks)
        )
        answered = self._answers - unanswered
        self._earned = [(answer, reward) for answer, reward in self._earned if answer < answered]
        self.over = False
        notes = await self.env.back(answered)
        if notes and self.remake is not None:
            notes = await self._rebuild(len(self.turns) - unanswered)
        for note in notes:
            self.emit({"ev": "note", "text": note})

    async def _rebuild(self, until: int) -> tuple[str, ...]:
        """Replaces an environment that cannot roll back by a new one, and replays the turns before `until` to it."""
        assert self.remake is not None
        await self.env.close()
        self.env = self.remake()
        await opened(self.env, self.task)
        return tuple(
            item.diverged
            for item in (await self._rerun(self.episode(), until)).reruns
            if not item.same
        )

    async def _rerun(self, episode: Episode, until: int) -> ReplayResult:
        """Replays an episode's turns before `until` to the environment, which was reset."""
        again = await rerun_calls(episode, self.env, until=until)
        self._adopt(again)
        return again

    def _adopt(self, world: ReplayResult) -> None:
        """Records that the environment is in the state after these turns."""
        self._earned, self.over = [] if world.earned is None else [(-1, world.earned)], world.over


async def _decisions(approve: Approve | None, calls: tuple[ToolCall, ...]) -> list[Answer]:
    """Return the user's decision about each call; without `approve` all are run."""
    answers: list[Answer] = []
    for index in range(len(calls)):
        last = answers[-1] if answers else None
        if approve is None:
            answers.append(Answer())
        elif last is not None and last.rest:
            answers.append(last)
        else:
            answers.append(await approve(calls[index:]))
    return answers


def failed_run(turns: Sequence[Turn]) -> int:
    """Return how many of the last assistant turns in a row have calls of which none could be parsed
    or matched a tool.
    """
    count = 0
    for turn in reversed([turn for turn in turns if turn.role in ("assistant", "user")]):
        if turn.role == "user" or not turn.calls or not all(call.error for call in turn.calls):
            break
        count += 1
    return count


def _in_place(answer: Answer) -> ToolResult:
    """Return the placeholder result of a call that was not run."""
    return ToolResult(REFUSED, error="refused") if answer.text is None else ToolResult(answer.text)
