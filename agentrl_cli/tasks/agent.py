"""`agent:` of a task.yaml, or of the settings: a program that makes the episodes in place of the built-in loop.

    agent: agent.py:solve                       a function, sync or async, of a file beside task.yaml or of a module
    agent: {function: agent.py:solve, timeout: 60}
    agent: {command: [python, agent.py], cwd: ., env: {MODE: fast}, timeout: 60, fields: [question]}
    agent: {remote: "127.0.0.1:8500", lease: 60}        agents elsewhere, which ask there for tasks

What runs these is in agents/runners.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool

from agentrl_cli.config.yamlfile import read_as
from agentrl_cli.errors import ConfigError
from agentrl_cli.tasks.beside import files_beside
from agentrl_cli.types.section import Seconds, Text

ENDS = {"timeout", "on_error", "rejects"}
KINDS = {
    "function": ENDS,
    "command": ENDS | {"cwd", "env", "fields", "sandbox"},
    "remote": ENDS | {"lease", "fields"},
}
"""Each kind of agent, and the keys that it may have besides."""
LEASE = 60.0


def _check_function(value: str) -> str:
    if not all(value.partition(":")):
        raise ValueError("not a function; write file.py:function or module:function")
    return value


def _check_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{value!r} is not an address; write HOST:PORT, such as 127.0.0.1:8500")
    return value


def _as_words(command: Any) -> Any:
    if not command:
        raise ValueError("empty; write a program and its arguments: [python, agent.py]")
    return shlex.split(command) if isinstance(command, str) else command


Masked = BeforeValidator(lambda value: None if value == "mask" else value)


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """A pack's settings of its agent."""

    kind: str
    """function, command or remote: a key of `agents.runners.attempt.RUNNERS`."""
    folder: Path
    """Where its relative paths start."""
    function: Annotated[str, AfterValidator(_check_function)] = ""
    """`module:function` or `file.py:function`."""
    command: Annotated[tuple[str, ...], BeforeValidator(_as_words)] = ()
    cwd: str = "."
    env: Mapping[Text, Text | None] = field(default_factory=dict)
    """Variables that the command gets besides its standard ones; None passes on the value of this process."""
    timeout: Seconds | None = None
    """Seconds of one episode's agent; None: `rollout.timeout.episode`."""
    fields: tuple[str, ...] = ()
    """Fields of a row that the command gets with its task: without it none, as they may hold the answer."""
    sandbox: StrictBool = False
    remote: Annotated[str, AfterValidator(_check_address)] = ""
    """`HOST:PORT` where agents elsewhere ask for tasks."""
    lease: Seconds = LEASE
    """Seconds of silence after which such an agent is dead."""
    on_error: Annotated[
        Annotated[float, Field(lt=1, strict=True, allow_inf_nan=False)] | None, Masked
    ] = 0.0
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
    given = {key: item for key, item in value.items() if item is not None}
    return read_as(AgentSpec, given, where, {kind, *KINDS[kind]}, kind=kind, folder=folder)
