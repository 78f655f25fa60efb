"""What the end of a process means: one of the closed set of results. A worker's word chooses only among the model's."""

from __future__ import annotations

import os
import signal
from typing import Any

import confine

_CLAIMS = frozenset({"ok", "exception", "exit", "memory", "disk_limit", "process_limit", "open_files_limit", "blocked"})
FULL, MANY, LARGE = "the work folder is full", "too many files", "a file is too large"
"""Which disk limit it was."""
_SAID = (
    (b"no space left on device", "disk_limit"),
    (b"file too large", f"disk_limit {LARGE}"),
    (b"file size limit exceeded", f"disk_limit {LARGE}"),
    (b"too many open files", "open_files_limit"),
    (b"fork: resource temporarily unavailable", "process_limit processes"),
    (b"cannot fork", "process_limit processes"),
    (b"can't start new thread", "process_limit threads"),
    (b"cannot allocate memory", "memory ENOMEM"),
    (b"memory exhausted", "memory ENOMEM"),
    (b"memoryerror", "memory MemoryError"),
)
"""What programs write to stderr where a limit stopped them, and what it means."""


_NONSENSE = "the session's process answered nonsense"


def claimed(header: dict[str, Any]) -> str:
    """The status that a worker claims, if it is one that it may choose."""
    status = header.get("status")
    return status if isinstance(status, str) and status in _CLAIMS else "exception"


def texts(header: dict[str, Any]) -> tuple[str, str]:
    """Detail and error text of an answer, cut to size."""
    return str(header.get("detail", ""))[:200], str(header.get("error", ""))[:300]


def number(text: str, most: int = 256) -> int:
    """A number below `most`, a power of two, that a worker claims: by default an exit code."""
    return int(text) & (most - 1) if text.isdecimal() and len(text) < 11 else 1


def read_note(fd: int) -> str:
    """What a program's process wrote about its end."""
    try:
        return os.read(fd, 200).decode("utf-8", "replace")
    except BlockingIOError:
        return ""


def full_detail() -> str:
    """Whether the work folder has no room for bytes, or for another file."""
    try:
        return MANY if os.statvfs(confine.WORK).f_ffree == 0 else FULL
    except OSError:
        return FULL


_SIGNALS: dict[int, dict[str, Any]] = {
    signal.SIGXCPU: {"status": "timeout", "detail": "cpu"},
    signal.SIGXFSZ: {"status": "disk_limit", "detail": LARGE},
}
"""Signals with which the kernel enforces a limit."""


def of_shell(reply: dict[str, Any], stderr: bytes) -> dict[str, Any]:
    """The result of a shell command: where a limit stopped its child, the limit, as far as code and last words tell."""
    last = b"\n".join(stderr.rstrip().splitlines()[-8:]).lower()
    if reply["status"] == "timeout" and b"fork: retry: resource temporarily unavailable" in last:
        return {**reply, "status": "process_limit", "detail": "processes"}  # bash waits for others to end
    if reply["status"] != "exit":
        return reply
    if reply["exit"] - 128 in _SIGNALS:
        return {**reply, **_SIGNALS[reply["exit"] - 128]}
    for words, note in _SAID:
        if words in last:
            name, _, detail = note.partition(" ")
            return {**reply, "status": name, "detail": detail or (full_detail() if name == "disk_limit" else "")}
    return reply


def ended(reason: str, status: int, used: float, limits: dict[str, Any], note: str) -> dict[str, Any]:
    """The result of a process that ended, or was killed for `reason`."""
    if reason not in ("exited", "deaf"):
        name, _, detail = reason.partition(":")
        return {"status": name, "detail": detail}
    if reason == "deaf":
        return {"status": "crashed", "detail": _NONSENSE}
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL and used >= limits["cpu"]:
            number = signal.SIGXCPU
        return dict(_SIGNALS.get(number) or {"status": "crashed", "signal": number})
    code = os.WEXITSTATUS(status)
    name, _, detail = note.partition(" ")
    if name in _CLAIMS and code:
        return {"status": name, "detail": detail[:200], "exit": code}
    return {"status": "exit" if code else "ok", "exit": code}


def unanswered(answers: list[list[Any]], late: bool) -> list[Any]:
    """What is said of calls after the last of `answers`: no state was left for them, or no time, or code left them."""
    if answers and answers[-1][0] == "state_lost":
        return ["state_lost", "", "", 0]
    return ["timeout", "budget", "", 0] if late else ["crashed", _NONSENSE, "", 0]
