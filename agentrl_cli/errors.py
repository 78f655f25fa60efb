"""One error tree. A user's mistake never shows a traceback; each class has its exit status.

    AgentRLError                    base; exit 1
    ├── RunFailed                   a run that could not continue; exit 1
    │   ├── EnvError                a task's code, a tool, a hook or a grader crashed
    │   ├── PolicyError             a model could not generate (out of memory, server unreachable)
    │   │   └── BadAnswer           an unusable answer of a server: masks its episode, and the run continues
    │   └── TrainingStopped         stopped itself with a named reason (NaN, entropy collapse)
    ├── UsageError                  exit 2
    │   ├── ConfigError             unknown key, bad value, no configuration
    │   ├── DataError               a row that fails its schema: file and line
    │   ├── NotFound                no such episode, run, task, pack: names the nearest
    │   ├── TemplateError           a chat template that cannot be used, or drifts
    │   └── ModelError              a missing or corrupt model folder, no chat template
    ├── EnvironmentProblem          exit 3: this machine lacks something
    │   ├── SandboxUnavailable      weaker isolation than the configured minimum
    │   ├── SandboxFault            the sandbox itself failed: retried, then masked, never scored zero
    │   ├── StoreError              newer version, locked, full disk, corrupt
    │   └── MissingDependency       an extra is not installed
    └── GateNotMet                  exit 4: `eval --fail-under`

`hint` names the next step; it is printed under the message.
"""

from __future__ import annotations

import difflib
import errno
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

_INSTALLED = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
"""Prefixes of file names that are not the user's code."""


class AgentRLError(Exception):
    """Base of everything raised on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RunFailed(AgentRLError):
    """A run that could not continue."""


class EnvError(RunFailed):
    """A task's code, a tool, a hook or a grader crashed."""


class PolicyError(RunFailed):
    """A model could not generate."""


class BadAnswer(PolicyError):
    """An inference server returned an unusable answer."""


class TrainingStopped(RunFailed):
    """A run stopped itself with a named reason."""


class UsageError(AgentRLError):
    """An invalid request of the user."""

    exit_code = 2

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> Self:
        """Return a message that names the nearest known names."""
        return cls(f"No {kind} named {name!r}.", hint=suggest(name, known, hint))


class ConfigError(UsageError):
    """Unknown key, bad value, or no configuration."""


class DataError(UsageError):
    """A row that fails its schema; the message names file and line."""


class NotFound(UsageError):
    """No such episode, run, task or pack."""


class TemplateError(UsageError):
    """A chat template that is missing, cannot be extended by appending, or drifts."""


class ModelError(UsageError):
    """A missing or corrupt model folder, or one that cannot be used for this."""


class EnvironmentProblem(AgentRLError):
    """This machine lacks something."""

    exit_code = 3


class SandboxUnavailable(EnvironmentProblem):
    """This machine offers only weaker isolation than the configured minimum."""


class SandboxFault(EnvironmentProblem):
    """The sandbox itself failed: retried once, then the episode is masked."""


class StoreError(EnvironmentProblem):
    """The store is newer, locked, full or corrupt."""


class MissingDependency(EnvironmentProblem):
    """An optional package is not installed."""


class GateNotMet(AgentRLError):
    """`eval --fail-under` was not reached."""

    exit_code = 4


KEPT = "Free some space; finished work is kept, and `agentrl train --resume last` continues a training."


def disk_problem(error: BaseException, what: str = "", hint: str = "") -> StoreError | None:
    """Return a StoreError for an error of a full or read-only disk; None for any other error.

    Libraries hide the system's error in their own messages or behind a later one, so the whole chain is searched.
    """
    for found in _chain(error):
        rust = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(found))
        number = getattr(found, "errno", None) or (int(rust[1] or rust[2]) if rust else None)
        name = what or str(getattr(found, "filename", None) or "")
        if number in (errno.ENOSPC, errno.EDQUOT):
            return StoreError(
                f"The disk is full{f': {name} could not be written' * bool(name)}.",
                hint=hint or KEPT,
            )
        if number == errno.EROFS:
            return StoreError(
                f"The disk is read-only{f': {name} could not be written' * bool(name)}.", hint=hint
            )
        if number in (errno.EACCES, errno.EPERM) and what:
            return StoreError(f"{what} could not be written: permission denied.", hint=hint)
    return None


def device_fault(error: BaseException) -> str:
    """Return the message of a fault after which this process cannot use its GPU again; empty for any other error.

    CUDA repeats it at every later call. Libraries hide it behind a later error, so the whole chain is searched.
    """
    for found in _chain(error):
        fault = re.search(r"\b(CUDA|HIP) error: .*", str(found))
        if fault and "out of memory" not in fault[0]:
            return fault[0].strip()
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def writing(what: str, hint: str = "") -> Iterator[None]:
    """Turn an OSError in the block into a StoreError about `what`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, AgentRLError):
            problem = disk_problem(error, what, hint)
            if problem is None and isinstance(error, OSError):
                problem = StoreError(
                    f"{what} could not be written: {error.strerror or error}.", hint=hint
                )
            if problem is not None:
                raise problem from error
        raise


@contextmanager
def needs_extra(message: str, extra: str) -> Iterator[None]:
    """Turn an import that fails in the block into a MissingDependency, which says how to install an extra."""
    try:
        yield
    except ImportError as error:
        raise MissingDependency(message, hint=f"pip install 'agentrl-cli[{extra}]'") from error


def nearest(name: str, known: Iterable[str], n: int = 2) -> list[str]:
    """Return the known names closest to `name`, best first, at most `n`."""
    return difflib.get_close_matches(name, list(known), n=n, cutoff=0.5)


def suggest(name: str, known: Iterable[str], hint: str = "", *, most: int = 12) -> str:
    """Return a hint that names the nearest known names, or all (at most `most`) if none is near."""
    known = [item for item in known if item]
    found = "" if known else "None exist."
    if near := nearest(name, known):
        found = f"Did you mean {' or '.join(near)}?"
    elif 0 < len(known) <= most:
        found = f"There are: {', '.join(known)}."
    return f"{found} {hint}".strip()


def pluralise(number: int, noun: str) -> str:
    """Return a count for a message: `1 task`, `2,000 tasks`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def describe_error(error: BaseException) -> str:
    """Return an exception of a user's code as text: its type, its message, and the last line of that code in its
    traceback.
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    places = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    for name, line in reversed(places):
        if not name.startswith(_INSTALLED):
            return f"{text} ({Path(name).name}:{line})"
    return text
