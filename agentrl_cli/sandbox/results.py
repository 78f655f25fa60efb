"""The closed set of results of an execution, in two halves, and the text that each shows to the model.

The model's half is an observation and is rewarded as usual. An infrastructure fault is retried once on a fresh runner
and then raised as SandboxFault: such an episode is masked, never scored zero.

`read_options` reads a pack's options for its sessions, over the configuration: `sandbox:` in its task.yaml.

sandbox: false                              no code runs: neither tools nor rewards need one
sandbox: {imports: [numpy], seed: 0, wall: 10, memory_mb: 4096}
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import Field

from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.config.yamlfile import read_as
from agentrl_cli.errors import ConfigError
from agentrl_cli.types.section import Count

USED: ContextVar[set[str] | None] = ContextVar("USED", default=None)
"""Within one tool call: the set of sandbox levels that it used."""


class Status(StrEnum):
    """The result of an execution."""

    OK = "ok"
    EXCEPTION = "exception"
    """An uncaught exception; the traceback is in stderr."""
    EXIT = "exit"
    """A program with a non-zero exit code (`exit_code`)."""
    TIMEOUT = "timeout"
    """`detail`: wall or cpu."""
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    """Killed because it wrote more than 16 MiB."""
    DISK_LIMIT = "disk_limit"
    """`detail`: the size of one file, of all files, or their number."""
    PROCESS_LIMIT = "process_limit"
    OPEN_FILES_LIMIT = "open_files_limit"
    CRASHED = "crashed"
    """Killed by a signal (`signal`)."""
    STATE_LOST = "state_lost"
    """The session's variables are lost: the code killed the process that kept them."""
    BLOCKED = "blocked"
    """An operation that the sandbox does not allow; `detail`: net, fs or syscall."""

    SANDBOX_RESTARTED = "sandbox_restarted"
    """The box or its runner stopped answering and was replaced."""
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"
    PROTOCOL_ERROR = "protocol_error"
    """A trusted part of the sandbox broke the protocol."""
    HOST_RESOURCES = "host_resources"
    """The host has no processes, memory or descriptors left."""

    @property
    def infrastructure(self) -> bool:
        """Whether the fault is the sandbox's and not the code's."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {
        Status.SANDBOX_RESTARTED,
        Status.SANDBOX_UNAVAILABLE,
        Status.PROTOCOL_ERROR,
        Status.HOST_RESOURCES,
    }
)

_LIMITS = {
    Status.MEMORY: "memory_mb",
    Status.OUTPUT_LIMIT: "output_kb",
    Status.PROCESS_LIMIT: "processes",
    Status.OPEN_FILES_LIMIT: "open_files",
}


def limit_of(status: str, detail: str) -> str:
    """Return the limit that an execution with this result met, by its name in the configuration; empty if none."""
    if status == Status.TIMEOUT:
        return "cpu" if detail == "cpu" else "wall"
    if status == Status.DISK_LIMIT:
        disks = {"a file is too large": "file_mb", "too many files": "inodes"}
        return disks.get(detail, "disk_mb")
    return _LIMITS.get(Status(status), "")


_MET = {
    "wall": "timed out after {0.wall:g} s",
    "cpu": "timed out after {0.cpu:g} s of CPU time",
    "memory_mb": "out of memory: the limit is {0.memory_mb} MiB",
    "output_kb": "stopped: it wrote more than 16 MiB of output",
    "file_mb": "disk limit reached: a file may have {0.file_mb} MiB",
    "inodes": "disk limit reached: there may be {0.inodes} files and folders in all",
    "disk_mb": "disk limit reached: all files together may have {0.disk_mb} MiB",
    "processes": "too many processes or threads: the limit is {0.processes}",
    "open_files": "too many open files: the limit is {0.open_files} for each process",
}
"""The limit that was met, to its message for the model."""
_TRACEBACK_LINES = 12
_BLOCKED = {
    "net": "there is no network in this sandbox",
    "fs": "that part of the file system is closed here; use the work folder",
    "syscall": "this sandbox does not permit that operation",
}


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of one execution."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    level: str = ""
    """The level it ran at: ns, docker, landlock or bare."""
    exit_code: int | None = None
    signal: int | None = None
    state_kept: bool = True
    """False if the session lost its variables."""
    rolled_back: bool = False
    """Whether the session was rolled back to the state before this cell."""
    files: str = ""
    """State of the changed files if a restore was requested: `restored`, or `left` as they are."""
    detail: str = ""
    stopped: int = 0
    """Number of processes that were still running at the end and were stopped."""
    truncated: bool = False
    """Whether the middle of the output was left out."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def infrastructure(self) -> bool:
        """Whether the fault is the sandbox's: such a result is not an observation."""
        return self.status.infrastructure

    @property
    def limit(self) -> str:
        """The limit that was met, by its name in the configuration; empty if none."""
        return limit_of(self.status, self.detail)

    @property
    def reason(self) -> str:
        """One line for the model on the outcome; empty if all went well."""
        words = self._describe()
        if not words:
            return ""
        if self.rolled_back and self.status is not Status.STATE_LOST:
            both = "variables and files" if self.files == "restored" else "variables"
            words += f"; {both} from this cell were discarded, earlier ones are kept"
            words += "; the files are as the cell left them" if self.files == "left" else ""
        if self.stopped:
            words += (
                f"; {self.stopped} process{'es' if self.stopped > 1 else ''} still running stopped"
            )
        return words

    def _describe(self) -> str:
        """Return the status in words."""
        if limit := self.limit:
            return _MET[limit].format(self.limits)
        match self.status:
            case Status.OK:
                return "warning: the code left processes running" if self.stopped else ""
            case Status.EXCEPTION:
                return ""
            case Status.EXIT:
                return f"exited with code {self.exit_code}"
            case Status.CRASHED:
                how = f" with {signal_name(self.signal)}" if self.signal else f": {self.detail}"
                return f"crashed{how}"
            case Status.STATE_LOST:
                return "all variables of this session are lost: the code ended, or held up, what kept them"
            case Status.BLOCKED:
                return f"blocked: {_BLOCKED.get(self.detail, self.detail)}"
        return f"the sandbox failed ({self.status}): {self.detail}"

    def text(self) -> str:
        """Return the text for the model: stdout, the end of stderr, and the outcome. Control characters are kept."""
        parts = [
            self.stdout.rstrip("\n"),
            _last_lines(self.stderr),
            f"[{self.reason}]" if self.reason else "",
        ]
        return "\n".join(part for part in parts if part) or "[no output]"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the work folder; links are listed and never followed."""

    path: str
    kind: str
    """file | folder | link | other"""
    size: int


class Listing(tuple[Entry, ...]):
    """Entries of the work folder, sorted by path."""

    more: bool = False
    """Whether there are others: only so many are listed."""


@dataclass(frozen=True, slots=True)
class GradeResult:
    """The result of a solution on hidden tests."""

    passed: int
    total: int
    failures: tuple[str, ...]
    """One line for each failed test, in order. For people: it names hidden inputs."""
    status: Status
    """OK, or why the solution did not load (the model's half)."""
    level: str
    fakeable: bool = False
    """Whether tests ran in the process of the solution, which could forge their result."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every test passed."""
        return self.total > 0 and self.passed == self.total

    @property
    def score(self) -> float:
        """The share of tests that passed."""
        return self.passed / self.total if self.total else 0.0


def signal_name(number: int) -> str:
    """Return the name of a signal, as SIGKILL; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(stderr: str) -> str:
    """Return the end of stderr; of a long traceback the head line and its last lines."""
    lines = stderr.rstrip("\n").splitlines()
    if len(lines) <= _TRACEBACK_LINES:
        return "\n".join(lines)
    start = [lines[0]] if lines[0].startswith("Traceback") else []
    return "\n".join([*start, "  …", *lines[-_TRACEBACK_LINES + 2 :]])


class SessionOptions(LimitsConfig):
    """A pack's options for its sessions."""

    imports: list[str] = Field(default=[])
    seed: Count | None = None


def read_options(value: Any, where: str) -> dict[str, Any]:
    """Arguments of `Sandbox.session`: limits as in the configuration, `imports`, `seed`. Raises ConfigError.

    `imports`: packages besides the standard library, imported before the first execution (a warm runner for each set).
    `seed`: of `random` and `numpy.random` in every session; without it each episode's own.
    """
    if value is None or isinstance(value, bool):
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where} must be true, false, or limits, such as {{wall: 10, imports: [numpy]}}."
        )
    options = read_as(SessionOptions, value, where, SessionOptions.model_fields).model_dump(
        exclude_unset=True
    )
    if "imports" in options:
        options["imports"] = package_names(options["imports"], where)
    return options


def package_names(names: list[str], where: str) -> tuple[str, ...]:
    """Return the unique top-level package names. Raises ConfigError for anything else."""
    if not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
        raise ConfigError(
            f"{where}: imports must be a list of package names, e.g. [numpy], not {names!r}."
        )
    return tuple(dict.fromkeys(names))
