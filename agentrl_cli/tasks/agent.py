"""`agent:` of a task.yaml, or of the settings: a program that makes the episodes in place of the built-in loop.

    agent: agent.py:solve                       a function, sync or async, of a file beside task.yaml or of a module
    agent: {function: agent.py:solve, timeout: 60}
    agent: {command: [python, agent.py], cwd: ., env: {MODE: fast}, timeout: 60, fields: [question]}
    agent: {remote: "127.0.0.1:8500", lease: 60}        agents elsewhere, which ask there for tasks

What runs these is in agents/runners.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.tasks.beside import files_beside

ENDS = {"timeout", "on_error", "rejects"}
KINDS = {
    "function": ENDS,
    "command": ENDS | {"cwd", "env", "fields", "sandbox"},
    "remote": ENDS | {"lease", "fields"},
}
"""Each kind of agent, and the keys that it may have besides."""
LEASE = 60.0


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """A pack's settings of its agent."""

    kind: str
    """function, command or remote: a key of `agents.runners.RUNNERS`."""
    folder: Path
    """Where its relative paths start."""
    function: str = ""
    """`module:function` or `file.py:function`."""
    command: tuple[str, ...] = ()
    cwd: str = "."
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that the command gets besides its standard ones; None passes on the value of this process."""
    timeout: float | None = None
    """Seconds of one episode's agent; None: `rollout.timeout.episode`."""
    fields: tuple[str, ...] = ()
    """Fields of a row that the command gets with its task: without it none, as they may hold the answer."""
    sandbox: bool = False
    remote: str = ""
    """`HOST:PORT` where agents elsewhere ask for tasks."""
    lease: float = LEASE
    """Seconds of silence after which such an agent is dead."""
    on_error: float | None = 0.0
    """Reward of an episode that ended by an exception which the model caused; None: it is masked like any other."""
    rejects: tuple[str, ...] = ()
    """Exceptions, by the name of their class, by which the agent's framework rejects what the model wrote."""
    target: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    """The function itself, of a pack made in a script; `function` is then its name for people."""

    @property
    def text(self) -> str:
        """The agent in a few words, for people."""
        return self.function or self.remote or shlex.join(self.command)

    @property
    def code(self) -> str:
        """Return the inputs that decide its behaviour, as far as known: settings, file, imports beside it."""
        where = self.folder / self.function.partition(":")[0]
        files = [where, *files_beside(where)] if where.suffix == ".py" and where.is_file() else []
        texts = [
            file.read_text(encoding="utf-8", errors="replace")
            for file in files
            if file.suffix == ".py"
        ]
        return "\n".join([repr(self), *(texts or [""])])


def read_agent(value: Any, folder: Path, where: str) -> AgentSpec | None:
    """Return the agent that a value names; None if absent. `where` is the file or setting, for messages.

    Raises ConfigError for what cannot be one.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = {"function": value}
    if not isinstance(value, Mapping) or sum(kind in value for kind in KINDS) != 1:
        raise ConfigError(
            f"{where} must be `file.py:function` or `module:function`, or a mapping with `function`, `command` "
            "or `remote`."
        )
    kind = next(kind for kind in KINDS if kind in value)
    for key in value:
        if key not in KINDS[kind] | {kind}:
            unknown = NotFound.of(f"key in {where} with a {kind}", str(key), sorted(KINDS[kind]))
            raise ConfigError(unknown.message, hint=unknown.hint)
    given = dict(value)
    if kind == "function":
        given["function"] = _function(given["function"], where)
    elif kind == "remote":
        given["remote"] = _address(given["remote"], where)
        given["lease"] = _seconds(given.get("lease"), f"{where}.lease") or LEASE
        given["fields"] = _texts(given.get("fields") or [], f"{where}.fields")
    else:
        given["command"] = _command(given["command"], where)
        given["env"] = _env(given.get("env"), where)
        given["fields"] = _texts(given.get("fields") or [], f"{where}.fields")
        given["cwd"] = _one(given.get("cwd", "."), f"{where}.cwd")
        given["sandbox"] = _flag(given.get("sandbox", False), f"{where}.sandbox")
    given["timeout"] = _seconds(given.get("timeout"), f"{where}.timeout")
    given["on_error"] = _on_error(given.get("on_error", 0.0), f"{where}.on_error")
    given["rejects"] = _texts(given.get("rejects") or [], f"{where}.rejects")
    return AgentSpec(kind, folder, **given)


def _function(value: Any, where: str) -> str:
    if not isinstance(value, str) or not all(value.partition(":")):
        raise ConfigError(
            f"{where}: {value!r} is not a function.",
            hint="Write file.py:function or module:function.",
        )
    return value


def _address(value: Any, where: str) -> str:
    host, _, port = str(value).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{where}.remote: {value!r} is not an address.", hint="Write HOST:PORT: 127.0.0.1:8500."
        )
    return str(value)


def _command(value: Any, where: str) -> tuple[str, ...]:
    found = (
        tuple(shlex.split(value)) if isinstance(value, str) else _texts(value, f"{where}.command")
    )
    if not found:
        raise ConfigError(
            f"{where}.command is empty.",
            hint="Write a program and its arguments: [python, agent.py].",
        )
    return found


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where} must be a list of texts, not {value!r}.")
    return tuple(value)


def _one(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be a text, not {value!r}.")
    return value


def _env(value: Any, where: str) -> dict[str, str | None]:
    if not isinstance(value or {}, Mapping):
        raise ConfigError(f"{where}.env must map names to values, not {value!r}.")
    return {str(name): None if text is None else str(text) for name, text in (value or {}).items()}


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, not {value!r}.")
    return value


def _on_error(value: Any, where: str) -> float | None:
    if value == "mask":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < 1:
        raise ConfigError(f"{where} must be `mask`, or a reward below 1, not {value!r}.")
    return float(value)


def _seconds(value: Any, where: str) -> float | None:
    number = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
    if value is not None and not number:
        raise ConfigError(f"{where} must be a number of seconds above 0, not {value!r}.")
    return None if value is None else float(value)
