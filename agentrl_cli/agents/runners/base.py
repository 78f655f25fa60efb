"""The arguments and results of runners."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from agentrl_cli.agents.emit import AgentCall
from agentrl_cli.errors import EnvError
from agentrl_cli.tasks import AgentSpec


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent ended."""

    reward: float | None = None
    """Its return value; None without one."""
    error: str = ""
    """Its exception or exit status; empty if it ended well."""
    stderr: str = ""
    """The end of what it wrote there."""
    raised: tuple[str, ...] = ()
    """Names of the classes of the exception that ended it and of its causes, as far as they are known, or its exit
    status; empty if neither ended it."""


class AgentLost(EnvError):
    """An agent elsewhere died: its episode begins again with another one."""


class Runner(Protocol):
    """Runs one kind of agent."""

    async def run(self, call: AgentCall) -> Ended:
        """Run the agent to its end. Cancelled, it stops the agent as far as that can be done."""
        ...

    @property
    def start_seconds(self) -> float:
        """Seconds that the agent may take until it calls its model, which do not count as its own; mostly 0."""
        ...

    @property
    def stderr(self) -> str:
        """The last output of an agent that was stopped; empty if its kind has no stream of its own."""
        ...


MakeRunner = Callable[[AgentSpec], Runner]

_PRINTED = re.compile(r"(?:\w+\.)*([A-Za-z_]\w*)(?::|$)")
"""The line of a traceback that names an exception."""


def exception_names(error: BaseException) -> tuple[str, ...]:
    """Return the names of an exception's classes and of those of its causes."""
    kinds = chain.from_iterable(type(cause).__mro__ for cause in _causes(error))
    return tuple(dict.fromkeys(kind.__name__ for kind in kinds if issubclass(kind, BaseException)))


_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("direct cause of the following exception:", "another exception occurred:")
"""Ends of the lines between the tracebacks of an exception and of what it was raised from."""


def printed_names(text: str) -> tuple[str, ...]:
    """Return the names of the exceptions of the last traceback in a text, causes included, or of its last line.

    Anything that a program logged before, a handled error included, does not count.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    begin = starts.pop() if starts else len(lines) - 1
    while begin > 1 and lines[begin - 1].endswith(_CHAINED):
        # The cause ends above that line; one that was never raised is printed without a traceback.
        end, begin = begin - 1, begin - 2
        if starts and all(line.startswith(" ") for line in lines[starts[-1] + 1 : end - 1]):
            begin = starts.pop()
    names = [found[1] for line in lines[max(begin, 0) :] if (found := _PRINTED.match(line))]
    known = [getattr(builtins, name, None) for name in names]
    above = [kind.__name__ for one in known if isinstance(one, type) for kind in one.__mro__]
    return tuple(dict.fromkeys([*names, *above]))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting.append(one.__cause__ or (None if one.__suppress_context__ else one.__context__))
