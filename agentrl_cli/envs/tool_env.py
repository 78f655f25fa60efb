"""The environment of an episode: `reset(task) → messages`, `step(assistant turn) → Step`, `close()`.

`ToolEnv` is the standard one: it runs the tools. An `Interaction` simulates the user and answers turns that call no
tool. An Env serves one episode; make a new one for the next.

    class Guess(Env):
        async def reset(self, task):
            self.secret = task.data["secret"]
            return list(task.prompt)

        async def step(self, turn):
            right = turn.content.strip() == self.secret
            reply = [] if right else [{"role": "user", "content": "No. Again."}]
            return Step(messages=reply, reward=float(right), terminated=right)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_cli.config import RolloutConfig
from agentrl_cli.envs.texts import MARK, add_opening, clip_text
from agentrl_cli.envs.user_simulator import Interaction, Reply
from agentrl_cli.errors import AgentRLError, EnvError, SandboxFault, describe_error
from agentrl_cli.hooks.threads import contain
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.tools import Tool, ToolContext, refuse
from agentrl_cli.types import Message, Outcome, RewardPart, Task, ToolCall, ToolResult, ToolSchema


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """An assistant turn, parsed."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    index: int = 0
    """Index of the assistant turn, from 0."""


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer. `terminated`: the episode is over; `truncated`: a limit cut it off."""

    messages: Sequence[Message] = ()
    """Tool or user messages to append; if empty, the episode is over."""
    results: tuple[ToolResult, ...] = ()
    """One per call, in order."""
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Env:
    """Base class: override `reset` and `step`. `schemas` are the tools that the model is shown.

    Both may be synchronous: they then run in a thread, and the episode's deadline cuts them off.
    """

    schemas: Sequence[ToolSchema] = ()
    tools: Mapping[str, Tool] = {}

    @property
    def talks(self) -> bool:
        """Whether assistant turns without a tool call are answered, too."""
        return True

    async def reset(self, task: Task) -> list[Message]:
        """Return the first messages, by default the task's prompt."""
        return list(task.prompt)

    async def step(self, turn: AssistantTurn) -> Step:
        """Answer an assistant turn."""
        raise NotImplementedError

    async def back(self, turn: int) -> tuple[str, ...]:
        """Rolls back to the state before assistant turn `turn` (from 0) was answered.

        Returns notes for the user on what cannot be rolled back: here everything, so the caller makes a new Env.
        """
        return ("the environment stays as it is",)

    def heard(self, turn: AssistantTurn, messages: Sequence[Message]) -> None:
        """Report that an assistant turn was answered in the environment's place (by a person in a chat)."""

    async def rewards(self) -> tuple[RewardPart, ...]:
        """Return the environment's own reward parts; called once, before `close`."""
        return ()

    async def close(self) -> None:
        """Free all resources. Called exactly once, also after errors."""


@dataclass(frozen=True, slots=True)
class _Before:
    """The environment's state before an assistant turn was answered."""

    turn: int
    calls: int | None
    """Calls made in the sandbox session so far; None: it was not open."""
    state: Mapping[str, Any]
    said: int
    feedback: int
    answers_left: int | None
    asked: int
    acts: tuple[str, ...]
    """Names that act in this turn and cannot be undone: tools with outside effects, the simulated user."""


class ToolEnv(Env):
    """Tools as environment. A call that cannot be run is answered with the problem; a failed tool, with its error."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        open_session: Callable[[], Awaitable[Any]] | None = None,
        interaction: Interaction | None = None,
        setup: str = "",
        max_parallel_calls: int = 4,
        tool_timeout: float = 10.0,
        max_user_turns: int | None = None,
        max_observation_chars: int | None = None,
        truncate_side: str = "middle",
        seed: int = 0,
        late: bool = False,
    ) -> None:
        """`open_session` opens the episode's sandbox session; `setup` is code run in it before the first call.

        `late`: a tool's state is created with its first call, not by `reset`: unused tools cost nothing, and
        one that cannot be created does not keep the others (a server offers more tools than an episode needs).

        `max_user_turns`: answers of the world (tool results or the user's) before the episode is cut off.
        """
        self.tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema for tool in tools]
        self.context = ToolContext(
            session_factory=self._prepare_session if open_session else None, seed=seed
        )
        self._open_session = open_session
        self._interaction = interaction
        self._setup = setup
        self._most = max_parallel_calls
        self._timeout = tool_timeout
        self._answers_left = max_user_turns
        self._chars, self._side = max_observation_chars, truncate_side
        self._states: dict[str, Any] = {}
        self._late = late
        self._creating = asyncio.Lock()
        self._said: list[Message] = []
        self._feedback: list[float] = []
        self._before: list[_Before] = []
        self._asked: list[int] = []
        """Number of messages at each question to the simulated user."""
        self._set_up = 0  # calls made in the session by the set-up code

    @property
    def talks(self) -> bool:
        """True if there is a simulated user."""
        return self._interaction is not None

    async def reset(self, task: Task) -> list[Message]:
        self.context.task = task
        for name in () if self._late else self.tools:
            await self.create(name)
        if self._interaction is not None:
            await self._interaction.start(task)
        self._said = add_opening(list(task.prompt), self.context.opening)
        return list(self._said)

    async def step(self, turn: AssistantTurn) -> Step:
        self._remember(turn)
        self._said.append({"role": "assistant", "content": turn.content})
        if self._answers_left is not None and (turn.calls or self.talks):
            if self._answers_left <= 0:
                return Step(truncated=True)
            self._answers_left -= 1
        if turn.calls:
            results = await _all([self._answer(n, call) for n, call in enumerate(turn.calls)])
            messages = [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
                for call, result in zip(turn.calls, results, strict=True)
            ]
            self._said += messages
            return Step(messages, results, terminated=any(result.done for result in results))
        if self._interaction is not None:
            self._asked.append(len(self._said))
            text, reward, done = Reply(*await self._interaction.reply(self._said))
            if reward is not None:
                self._feedback.append(reward)
                self.context.state["feedback"] = self._feedback
            if text is not None:
                self._said.append({"role": "user", "content": text})
                return Step([self._said[-1]], reward=reward, terminated=done)
            return Step(reward=reward, terminated=True)
        return Step(terminated=True)

    async def back(self, turn: int) -> tuple[str, ...]:
        """Roll back to before assistant turn `turn` (from 0): the sandbox session, the tools' shared state and a
        simulated user that `restarts`. Returns notes for the user on the rest.
        """
        undone = [before for before in self._before if before.turn >= turn]
        if not undone:
            return ()
        del self._before[-len(undone) :]
        first, session = undone[0], self.context.opened
        notes = [
            f"what {name} did stays done"
            for name in sorted({name for item in undone for name in item.acts})
        ]
        if session is not None:
            calls = self._set_up if first.calls is None else first.calls
            diverged = await session.back(calls + 1) if len(session.history) > calls else ()
            notes += [
                f"diverged at call {item.call}: {item.recorded!r:.80}, now {item.now!r:.80}"
                for item in diverged
            ]
        self.context.state.clear()
        self.context.state.update(first.state)
        del self._said[first.said :]
        del self._feedback[first.feedback :]
        self._answers_left = first.answers_left
        await self._user_back(first.asked)
        return tuple(notes)

    async def _user_back(self, asked: int) -> None:
        """The simulated user as it was after this many questions: started again, and asked the same."""
        user, undone = self._interaction, len(self._asked) > asked
        del self._asked[asked:]
        if (
            user is None
            or not undone
            or not getattr(user, "restarts", False)
            or self.context.task is None
        ):
            return
        await user.stop()
        await user.start(self.context.task)
        for length in self._asked if not getattr(user, "stateless", False) else ():
            await user.reply(self._said[:length])

    def heard(self, turn: AssistantTurn, messages: Sequence[Message]) -> None:
        self._remember(turn, acts=False)
        self._said += [{"role": "assistant", "content": turn.content}, *messages]

    def _remember(self, turn: AssistantTurn, *, acts: bool = True) -> None:
        known = [self.tools[call.name] for call in turn.calls if call.name in self.tools]
        names = {tool.name for tool in known if not tool.rewinds and not tool.pure}
        if (
            not turn.calls
            and self._interaction is not None
            and not getattr(self._interaction, "restarts", False)
        ):
            names.add("the simulated user")
        session = self.context.opened
        calls = None if session is None else len(session.history)
        left = (len(self._said), len(self._feedback), self._answers_left, len(self._asked))
        self._before.append(
            _Before(
                turn.index, calls, dict(self.context.state), *left, tuple(names) if acts else ()
            )
        )

    async def call(self, call: ToolCall) -> ToolResult:
        """Runs one call outside a turn. Raises EnvError and SandboxFault; other errors are results."""
        return await self._answer(0, call)

    async def rewards(self) -> tuple[RewardPart, ...]:
        """`tool:<name>` of every tool with a reward, and `interaction`; weight 0 unless configured."""
        parts = []
        for name, tool in self.tools.items():
            value = await tool.reward(self._states[name]) if name in self._states else None
            if value is not None:
                parts.append(RewardPart(f"tool:{name}", value, 0.0))
        if self._feedback:
            turns = ", ".join(f"{reward:g}" for reward in self._feedback)
            parts.append(
                RewardPart("interaction", sum(self._feedback), 0.0, detail=f"by turn: {turns}")
            )
        return tuple(parts)

    async def close(self) -> None:
        """Release the tools, then the session; a failing one does not block the others."""
        problems: list[Exception] = []
        states, self._states = self._states, {}
        closers: list[Callable[[], Awaitable[None]]] = [
            *(
                lambda name=name, state=state: self.tools[name].release(state)
                for name, state in states.items()
            ),
            self.context.close,
        ]
        if self._interaction is not None:
            closers.append(self._interaction.stop)
        for close in closers:
            try:
                with contain("its code"):
                    await close()
            except Exception as error:  # noqa: BLE001 - the others must still be released; raised below
                problems.append(error)
        if problems:
            raise EnvError(f"Closing an episode failed: {problems[0]}") from problems[0]

    async def _answer(self, number: int, call: ToolCall) -> ToolResult:
        if number >= self._most:
            text = f"Not run: at most {self._most} calls in one turn. Call it again."
            return ToolResult(text, error="too_many_calls")
        if call.error is not None or call.arguments is None or call.name not in self.tools:
            return refuse(call, self.tools)
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
        with waiting(f"the tool {call.name} {arguments}"):
            state = await self.create(call.name)
            result = await self.tools[call.name].call(state, call.arguments, timeout=self._timeout)
        # A tool server may have cut it already, to the same limit.
        cut_before = MARK if result.truncated else 0
        if self._chars is None or len(result.text) <= self._chars + cut_before:
            return result
        return replace(result, text=clip_text(result.text, self._chars, self._side), truncated=True)

    async def create(self, name: str) -> Any:
        """Return a tool's state, created the first time. Raises EnvError if that fails."""
        if name not in self._states:
            async with self._creating:
                if name not in self._states:
                    try:
                        with contain(f"The tool {name}"):
                            self._states[name] = await self.tools[name].create(self.context)
                    except Exception as error:
                        raise as_env_error(error) from error
        return self._states[name]

    async def _prepare_session(self) -> Any:
        """Return the session, after running the task's set-up code in it."""
        assert self._open_session is not None
        with waiting("the start of a sandbox session"):
            session = await self._open_session()
        if self._setup:
            try:
                with waiting("the task's set-up code"):
                    result = await session.cell(self._setup)
                if not result.ok:
                    raise EnvError(f"The task's set-up code failed: {result.text()}")
            except BaseException:  # of a deadline, too: the context does not have the session yet
                await session.close()
                raise
            self._set_up = len(session.history)
        return session


def tool_env(
    limits: RolloutConfig,
    tools: Sequence[Tool],
    task: Task,
    *,
    open_session: Callable[[], Awaitable[Any]] | None = None,
    interaction: Interaction | None = None,
    seed: int = 0,
    late: bool = False,
) -> ToolEnv:
    """Return the standard environment of a task under the settings; `tool_choice: none` takes the tools away."""
    return ToolEnv(
        () if task.data.get("tool_choice") == "none" else tools,
        open_session=open_session,
        interaction=interaction,
        setup=str(task.data.get("setup") or ""),
        max_parallel_calls=limits.max_parallel_calls,
        tool_timeout=limits.timeout.tool,
        max_user_turns=limits.max_user_turns,
        max_observation_chars=limits.observation.chars,
        truncate_side=limits.observation.cut,
        seed=seed,
        late=late,
    )


async def _all(calls: Sequence[Coroutine[Any, Any, ToolResult]]) -> tuple[ToolResult, ...]:
    """Return the results in order. If a call raises, the others finish first, so none runs in a closed session."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return tuple(answer for answer in answers if isinstance(answer, ToolResult))


def fault_of(error: Exception) -> tuple[Outcome, str]:
    """Return the outcome and error text of an episode that an exception ended: a sandbox_error or an env_error."""
    outcome = Outcome.SANDBOX_ERROR if isinstance(error, SandboxFault) else Outcome.ENV_ERROR
    return outcome, as_env_error(error).message


def as_env_error(error: BaseException) -> AgentRLError:
    """Return an exception from a task's code as an EnvError; AgentRL errors pass unchanged."""
    if isinstance(error, AgentRLError):
        return error
    return EnvError(describe_error(error))
