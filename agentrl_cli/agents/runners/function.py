"""Agents that are functions: `def agent(task, base_url, api_key, model)`, sync or async."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_cli.agents.emit import CURRENT, AgentCall, reward_value
from agentrl_cli.agents.runners.base import Ended, exception_names
from agentrl_cli.errors import ConfigError, EnvError, describe_error
from agentrl_cli.hooks.threads import contain, in_thread, is_async
from agentrl_cli.registry import resolve
from agentrl_cli.tasks import AgentSpec

NAMES = ("task", "base_url", "api_key", "model", "emit_reward", "event_url")
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
        self.start_seconds: float = getattr(
            getattr(self._function, "__self__", None), "start_seconds", 0.0
        )
        self._names = _parameters(self._function, spec.function)

    async def run(self, call: AgentCall) -> Ended:
        """Return the function's answer: a reward, or None. An exception of it is the error that ended it."""
        given = {name: getattr(call, name) for name in self._names}
        token = CURRENT.set(call)
        try:
            with contain("The agent"):
                answer = await self._answer(given)
        except EnvError as error:
            return Ended(error=error.message, raised=exception_names(error.__cause__ or error))
        except Exception as error:  # noqa: BLE001 - an agent may raise anything: it ends its own episode alone
            return Ended(error=describe_error(error)[:2000], raised=exception_names(error))
        finally:
            CURRENT.reset(token)
        if answer is None:
            return Ended()
        try:
            return Ended(reward_value(answer))
        except ValueError as error:
            return Ended(error=f"The agent returned {error}, or None.")

    async def _answer(self, given: dict[str, Any]) -> Any:
        function = self._function
        answer = function(**given) if is_async(function) else await in_thread(function, **given)
        return await answer if inspect.isawaitable(answer) else answer


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
