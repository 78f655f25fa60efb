"""The parts of an episode that a reward function may use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from agentrl_cli.errors import EnvError
from agentrl_cli.types import Episode, Message, Task, Turn
from agentrl_cli.types.content import content_text

if TYPE_CHECKING:
    from agentrl_cli.sandbox import GradeResult


class Scored(NamedTuple):
    """The value of a part, and what people should know of it."""

    value: float
    detail: str = ""


@dataclass
class RewardContext:
    """The context of a reward function: the task, the final text, the still open sandbox session, the tools' states."""

    task: Task
    final_text: str
    """Content of the last assistant turn; empty without one."""
    open_session: Callable[[], Any] | None = None
    """Coroutine function that gives the episode's sandbox session, opening it if need be."""
    state: MutableMapping[str, Any] = field(default_factory=dict)
    """What tools left for rewards, `answer` of `submit` for instance."""
    fakeable: bool = False
    """Whether `grade` ran tests beside the solution since the current part began."""
    reason: str = ""
    """Why the primary part could not be given, see `ungraded`."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Ids to the text that functions of a response see: special tokens left out."""

    def response(self, episode: Episode) -> str:
        """Everything after the prompt as one text, tool results included; of an episode that branches its main one."""
        episode = episode.chain(episode.main)
        made = answer_turns(episode.turns)
        first = made[0].start if made else len(episode.tokens)
        if self.decode is not None:
            return self.decode(episode.tokens.ids[first:].tolist())
        answers = [turn for turn in episode.turns if turn.start >= first]
        return "\n".join(content_text(m.get("content")) for turn in answers for m in turn.messages)

    def part(self, value: float, detail: str = "") -> Scored:
        """Return a value with a text for people."""
        return Scored(value, detail)

    def ungraded(self, reason: str) -> None:
        """Returned by a primary part that cannot be given: the episode is ungraded, neither scored nor trained."""
        self.reason = reason

    async def session(self) -> Any:
        """Return the episode's sandbox session. Raises EnvError if the run has no sandbox."""
        if self.open_session is None:
            raise EnvError("This reward runs code, and the run has no sandbox.")
        return await self.open_session()

    async def grade(
        self, solution: str, tests: Sequence[Mapping[str, Any] | str], **options: Any
    ) -> GradeResult:
        """Run hidden tests `{"call", "args", "expect"}` against a solution, in the sandbox and apart from it.

        `options`: `setup` (code that runs first), `wall` and `budget` (seconds of one test, of all), see
        sandbox/grading.py. Tests that run beside the solution make the part `fakeable`.
        Raises SandboxFault if the sandbox itself failed.
        """
        from agentrl_cli.sandbox import grade

        given = [test if isinstance(test, str) else dict(test) for test in tests]
        result = await grade(await self.session(), solution, given, **options)
        self.fakeable |= result.fakeable
        return result


class Gate:
    """Lets so many in at once, in each event loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._gates = WeakKeyDictionary()

    @property
    def here(self) -> asyncio.Semaphore:
        """The semaphore of the running event loop."""
        loop = asyncio.get_running_loop()
        return self._gates.setdefault(loop, asyncio.Semaphore(self._count))


def answer_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return the assistant's turns that were made in an episode, without those that its prompt has as history.

    Only they say why they stopped. Where none does, as in an import, all of the assistant's are.
    """
    said = [turn for turn in turns if turn.role == "assistant"]
    return [turn for turn in said if turn.stop_reason is not None] or said


def split_messages(episode: Episode, ctx: RewardContext) -> tuple[list[Message], list[Message]]:
    """(prompt, completion) as messages: the completion begins with the first answer of the main branch."""
    episode = episode.chain(episode.main)
    made = answer_turns(episode.turns)
    first = episode.turns.index(made[0]) if made else len(episode.turns)
    prompt = [message for turn in episode.turns[:first] for message in turn.messages]
    return prompt or list(ctx.task.prompt), [
        message for turn in episode.turns[first:] for message in turn.messages
    ]
