"""The arguments and results of runners, and the simplest of them.

It runs agents that are functions: `def agent(task, base_url, api_key, model)`, sync or async.
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from agentrl_cli.agents.emit import CURRENT, AgentCall, reward_value
from agentrl_cli.errors import ConfigError, EnvError, describe_error
from agentrl_cli.hooks.threads import contain, in_thread, is_async
from agentrl_cli.registry import resolve
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
    players: Mapping[str, float] = field(default_factory=dict)
    """The reward of each player that the model played, if it returned several; `reward` is their mean."""
    alone: bool = False
    """Whether the reward is a number alone on stdout, which may be the answer: the pack's own parts go before it."""


class AgentLost(EnvError):
    """An agent elsewhere died: its episode begins again with another one."""


class WorldFault(EnvError):
    """The environment that an agent plays has crashed: its episode is masked, whatever the model did."""


class Runner(Protocol):
    """Runs one kind of agent."""

    async def run(self, call: AgentCall) -> Ended:
        """Run the agent to its end. Cancelled, it stops the agent as far as that can be done."""

    @property
    def start_seconds(self) -> float:
        """Seconds that the agent may take until it calls its model, which do not count as its own; mostly 0."""

    @property
    def stderr(self) -> str:
        """The last output of an agent that was stopped; empty if its kind has no stream of its own."""


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


NAMES = ("task", "base_url", "api_key", "model", "emit_reward", "event_url", "attempt")
"""Parameters that a function may have."""


class FunctionRunner:
    """Calls a function with what its parameters name: a sync one in a thread, an async one in the event loop.

    A sync function that is cancelled runs on in its thread; its model calls are refused from then on.
    """

    stderr = ""

    def __init__(self, spec: AgentSpec) -> None:
        """Raise NotFound, EnvError (its file fails), ConfigError (not a function, or with unknown parameters)."""
        self.spec = spec
        base = spec.folder
        where = Path(spec.function.partition(":")[0])
        if where.suffix == ".py" and not (base / where).is_file():
            base = Path.cwd()
        self._function = spec.target or resolve("agents", {}, spec.function, base=base)
        self._owner = owner = getattr(self._function, "__self__", self._function)
        self.start_seconds: float = getattr(owner, "start_seconds", 0.0)
        self.models: Sequence[str] = getattr(owner, "models", ())
        """Further models that it may call by name: frozen ones, whose turns are context."""
        self._names = _parameters(self._function, spec.function)

    async def require(self) -> None:
        """Raise NotFound, EnvError for an environment of another project that does not start with its options."""
        if hasattr(self._owner, "require"):
            await in_thread(self._owner.require, self.spec.folder)

    async def run(self, call: AgentCall) -> Ended:
        """Return the function's answer: a reward, or None. An exception of it is the error that ended it."""
        given = {name: getattr(call, name) for name in self._names}
        token = CURRENT.set(call)
        try:
            with contain("The agent"):
                answer = (
                    self._function(**given)
                    if is_async(self._function)
                    else await in_thread(self._function, **given)
                )
                if inspect.isawaitable(answer):
                    answer = await answer
        except WorldFault:
            raise
        except EnvError as error:
            return Ended(error=error.message, raised=exception_names(error.__cause__ or error))
        except Exception as error:  # noqa: BLE001 - an agent may raise anything: it ends its own episode alone
            return Ended(error=describe_error(error)[:2000], raised=exception_names(error))
        finally:
            CURRENT.reset(token)
        if answer is None:
            return Ended()
        try:
            if not isinstance(answer, Mapping):
                return Ended(reward_value(answer))
            players = {str(player): reward_value(value) for player, value in answer.items()}
            return Ended(fmean(players.values()) if players else None, players=players)
        except ValueError as error:
            return Ended(error=f"The agent returned {error}, or None.")


def _parameters(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Return the names of the arguments that a function takes. Raises ConfigError for one that is not known."""
    if not callable(function):
        raise ConfigError(f"The agent {name} is not a function.")
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return NAMES
        if parameter.name in NAMES and parameter.kind is not parameter.POSITIONAL_ONLY:
            found.append(parameter.name)
        elif (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            known = ", ".join(NAMES)
            raise ConfigError(
                f"The agent {name} has the parameter {parameter.name!r}, which no episode gives.",
                hint=f"It may take, by name: {known}.",
            )
    return tuple(found)
