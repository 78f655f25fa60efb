"""A conversation: the agent loop a step at a time, with a person in the place of its end.

Sampled tokens keep their log-probabilities, and text that the person wrote in the model's place is FORCED and never
trained. The person's actions are in session.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat_session.rerun import (
    BY_PERSON,
    ReplayResult,
    chain_to,
    open_world,
    place_results,
    rerun_calls,
    results_of,
    resume,
    step_of,
)
from agentrl_cli.envs.tool_env import AssistantTurn, Env, Step, ToolEnv
from agentrl_cli.errors import UsageError
from agentrl_cli.rollout.attempt import new_episode
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job, seed_of
from agentrl_cli.rollout.loop import LoopAttempt
from agentrl_cli.rollout.recorder import Recorder
from agentrl_cli.rollout.transcript import Transcript
from agentrl_cli.tasks import Pack
from agentrl_cli.types import (
    AgentState,
    Episode,
    Generation,
    Message,
    Sampling,
    Task,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)

Emit = Callable[[dict[str, Any]], None]
MakeEnv = Callable[[Task], Awaitable[Env]]

MAX_TURNS = 8
"""Turns that the model takes in a row, if `rollout.max_turns` does not say more."""
UNLIMITED = 1 << 40
"""Tokens of a chat: only the model's context limits it."""
FAILED_RUN = 3
"""Turns in a row without a call that can be run, after which the model is stopped."""
REFUSED = "Not run: the person refused this call."


@dataclass(frozen=True, slots=True)
class Answer:
    """The user's decision about tool calls: run them, refuse them, or answer in the tool's place."""

    run: bool = True
    text: str | None = None
    rest: bool = False
    """Whether the decision also applies to the turn's other calls."""


Approve = Callable[[tuple[ToolCall, ...]], Awaitable[Answer]]
"""Called once per tool call with the turn's remaining calls, that one first."""


@dataclass
class Options:
    """A person's settings for all conversations of a chat."""

    simulate: bool = True
    """Whether the environment answers turns without a call."""
    approve: Approve | None = None
    """Called before tools run."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling settings that differ from the configuration's."""


class ShownTranscript(Transcript):
    """A transcript whose turns become events as they are appended."""

    def __init__(self, episode: Episode, chat: Chat, emit: Emit) -> None:
        super().__init__(episode, chat, Recorder())
        self.emit = emit

    def record(self, turn: Turn, tokens: Tokens) -> None:
        """Append a turn and report it."""
        super().record(turn, tokens)
        self.emit({"ev": "turn", "turn": turn, "tokens": tokens})


class Conversation(LoopAttempt):
    """One conversation. `emit` gets an event for each turn and token."""

    def __init__(
        self,
        context: RolloutContext,
        pack: Pack,
        job: Job,
        env: Env,
        emit: Emit,
        options: Options,
        make_env: MakeEnv | None,
    ) -> None:
        """`make_env` makes a new environment if this one cannot roll back."""
        super().__init__(context, pack, job)
        self.env, self.emit, self.options, self.make_env = env, emit, options, make_env
        self.most, self.max_turns = UNLIMITED, max(self.limits.max_turns, MAX_TURNS)
        episode = new_episode(job, context.policy.weights_version)
        self.transcript = ShownTranscript(episode, context.chat, emit)
        self.tries = 0
        """How often a turn was sampled again."""
        self.places: tuple[int, ...] = ()
        """After `resume` the index of each of the parent's turns in the stored episode."""
        self._kept = 0
        """Leading turns that are the parent's."""

    @property
    def turns(self) -> list[Turn]:
        return self.transcript.turns

    @property
    def answered_last(self) -> bool:
        """Whether the last turn is the assistant's, so that the user or a tool comes next."""
        return bool(self.turns) and self.turns[-1].role == "assistant"

    @property
    def last_answer(self) -> AssistantTurn:
        last = self.turns[-1]
        content = str(last.messages[0].get("content") or "") if last.messages else ""
        return AssistantTurn(content, last.calls, self.transcript.answers - 1)

    def episode(self) -> Episode:
        """Return the conversation so far as an episode, a child of the one it continues."""
        branch = (*self.places, max(self.places) + 1)[self._kept] if self.places else None
        version = self.context.policy.weights_version
        return self.transcript.so_far().with_(parent_turn=branch, weights_version=version)

    async def close(self) -> None:
        """Release the policy's state of the conversation, and the tools."""
        await self.context.policy.release(self.transcript.episode.id)
        await self.env.close()

    async def resume(self, episode: Episode, turn: int) -> ReplayResult:
        """Start from the turns of a stored episode before turn `turn`; its tool calls run again for their effects.

        Token ids are the stored ones; results whose calls answer otherwise now are marked. Raises UsageError if it
        is not the model's turn there.
        """
        chain, at, self.places = chain_to(episode, turn)
        world = await resume(self, chain, at)
        text, self._kept = self.transcript, at
        text.episode = text.episode.with_(
            parent_id=episode.id, run_id=episode.run_id, step=episode.step
        )
        for item, tokens in zip(text.turns, text.parts, strict=True):
            self.emit({"ev": "turn", "turn": item, "tokens": tokens})
        return world

    async def reply(self) -> None:
        """Sample turns until the environment has no answer, or `max_turns` is reached."""
        for _ in range(self.max_turns):
            state = await self.generate()
            calls = self.parsed.calls
            if not calls and not (self.options.simulate and self.env.talks):
                return
            if state is AgentState.TERMINATED:
                if calls:
                    self.note("the turn was cut off, so its calls are not run: /retry, /set")
                return
            if not await (self.run_tools() if calls else self.ask_world(self.parsed)):
                return
            if failed_run(self.turns) >= FAILED_RUN:
                self.note(
                    f"stopped: {FAILED_RUN} turns in a row without a call that can be run."
                    " /as-model shows it how, /call runs a tool by hand, /undo"
                )
                return
        self.note(f"stopped after {self.max_turns} turns; say something to continue")

    def turn_seed(self, done: int) -> int:
        """Return the seed of a turn, another one at each retry."""
        return seed_of(self.job.seed, done, self.tries)

    async def sample(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue a context under the chat's settings, reporting each token. Raises UsageError if it is full."""
        policy, text, self.cut = self.context.policy, self.transcript, None
        wanted = {"max_new_tokens": self.limits.max_new_tokens, **self.options.sampling}
        wanted["max_new_tokens"] = min(wanted["max_new_tokens"], policy.context_length - len(ids))
        if wanted["max_new_tokens"] < 1:
            raise UsageError(
                "The context is full.", hint="/undo makes room; /save stores the chat so far."
            )
        loop = asyncio.get_running_loop()

        def on_token(token: int) -> None:  # may come from the policy's thread
            loop.call_soon_threadsafe(self.emit, {"ev": "token", "id": token})

        generation = await policy.generate(
            text.episode.id,
            ids,
            replace(sampling, **wanted),
            on_token=on_token,
            images=tuple(text.images),
        )
        await asyncio.sleep(0)  # the tokens are reported before the turn that they make
        return generation

    def limit_response(self, prompt: int) -> None:
        """Ignore `rollout.response_tokens`: a chat may be as long as the context."""

    def _check(self, new: Sequence[Message], delta_ids: Sequence[int]) -> None:
        """Skip the drift guard: nothing is trained on a chat as it stands."""

    def note(self, text: str) -> None:
        """Report a text to the person."""
        self.emit({"ev": "note", "text": text})

    def answer(self, messages: list[Message], results: tuple[ToolResult, ...] = ()) -> None:
        """Append an answer that the environment did not give, and report it to the environment."""
        self.env.heard(self.last_answer, messages)
        self.observe(Step(messages, results))

    async def ask_world(self, turn: AssistantTurn) -> bool:
        """Append the environment's answer to a turn. Returns whether the model should continue."""
        step = await step_of(self.env, turn)
        step = replace(step, results=results_of(step) if turn.calls else ())
        state = self.observe(step)
        if not turn.calls and (step.terminated or not step.messages):
            self.note("the environment ended the conversation: /reward scores it")
        return state is AgentState.GENERATING and not step.truncated

    async def run_tools(self) -> bool:
        """Run, refuse or answer the turn's calls one by one. Returns whether the model should continue."""
        turn = self.parsed
        answers, approve = list[Answer](), self.options.approve
        for index in range(len(turn.calls)):
            last = answers[-1] if answers else Answer()
            ask = None if last.rest else approve
            answers.append(last if ask is None else await ask(turn.calls[index:]))
        if all(answer.run for answer in answers):
            return await self.ask_world(turn)
        if not any(answer.run or answer.text is not None for answer in answers):
            self.note("not run: /as-tool TEXT answers in the tool's place, /undo removes it")
            return False
        run = tuple(call for call, answer in zip(turn.calls, answers, strict=True) if answer.run)
        step = await step_of(self.env, replace(turn, calls=run)) if run else Step()
        given = [
            None
            if answer.run
            else ToolResult(REFUSED, error="refused", metrics={BY_PERSON: 1.0})
            if answer.text is None
            else ToolResult(answer.text, metrics={BY_PERSON: 1.0})
            for answer in answers
        ]
        results = place_results(given, results_of(step))
        messages = tool_messages(turn.calls, results)
        if not run:
            self.answer(messages, results)
            return True
        step = replace(step, messages=messages, results=results)
        return self.observe(step) is AgentState.GENERATING

    async def drop(self, keep: int) -> None:
        """Drop all turns from `keep` on, and roll the environment back."""
        text = self.transcript
        text.restore(text.turns[:keep], text.parts[:keep])
        self._kept = min(self._kept, keep)
        self.emit({"ev": "cut", "turns": keep})
        # the last turn is kept without its answer, so the environment must forget that it answered it
        unanswered = self.answered_last and (bool(self.turns[-1].calls) or self.env.talks)
        if unanswered:
            text.turns[-1] = replace(text.turns[-1], reward=None)
        notes: Sequence[str] = await self.env.back(text.answers - unanswered)
        if notes and self.make_env is not None and not isinstance(self.env, ToolEnv):
            # It cannot roll back: the turns are replayed to a new one.
            await self.env.close()
            self.env = await self.make_env(self.job.task)
            await open_world(self.env, self.job.task)
            left = len(self.turns) - unanswered
            again = await rerun_calls(self.episode(), self.env, until=left)
            notes = [item.diverged for item in again.reruns if not item.same]
        for note in notes:
            self.note(note)


def tool_messages(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
    """Return the messages that answer calls with results."""
    return [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
        for call, result in zip(calls, results, strict=True)
    ]


def failed_run(turns: Sequence[Turn]) -> int:
    """Return how many of the last assistant turns in a row have calls of which none could be parsed or run."""
    count = 0
    for turn in reversed([turn for turn in turns if turn.role in ("assistant", "user")]):
        if turn.role == "user" or not turn.calls or not all(call.error for call in turn.calls):
            break
        count += 1
    return count
