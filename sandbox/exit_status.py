"""Maps exit status, signals and limits to a result. A worker's claim chooses only among the model's own faults."""

from __future__ import annotations

import os
import signal
from typing import Any

from sandbox.isolation import namespaces

_CLAIMS = frozenset(
    {
        "ok",
        "exception",
        "exit",
        "memory",
        "disk_limit",
        "process_limit",
        "open_files_limit",
        "blocked",
    }
)
FULL, MANY, LARGE = "the work folder is full", "too many files", "a file is too large"
"""Which disk limit was met."""
_MESSAGES = (
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
"""What programs write to stderr when they meet a limit, and the note it stands for."""
_INVALID = "the session's process answered nonsense"


def read_status(header: dict[str, Any]) -> str:
    """Return the status that a worker claims; `exception` if it may not choose it."""
    status = header.get("status")
    return status if isinstance(status, str) and status in _CLAIMS else "exception"


def texts(header: dict[str, Any]) -> tuple[str, str]:
    """Return the detail and error text of an answer, cut to size."""
    return _printable(str(header.get("detail", "")))[:200], _printable(
        str(header.get("error", ""))
    )[:300]


def _printable(text: str) -> str:
    """Escapes control characters: a class may have any name, and people read it in their terminal."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def number(claim: Any, most: int = 256) -> int:
    """Return a number below `most` (a power of two) that a worker claims, by default an exit code;
    1 if it is invalid.
    """
    text = str(claim)
    return int(text) & (most - 1) if text.isdecimal() and len(text) < 11 else 1


def read_note(fd: int) -> str:
    """Return the note that a program's process wrote about its end; empty if absent."""
    try:
        return _printable(os.read(fd, 200).decode("utf-8", "replace"))
    except BlockingIOError:
        return ""


def full_detail() -> str:
    """Return which disk limit is met: bytes, or number of files."""
    try:
        return MANY if os.statvfs(namespaces.WORK).f_ffree == 0 else FULL
    except OSError:
        return FULL


_SIGNALS: dict[int, dict[str, Any]] = {
    signal.SIGXCPU: {"status": "timeout", "detail": "cpu"},
    signal.SIGXFSZ: {"status": "disk_limit", "detail": LARGE},
}
"""Signals with which the kernel enforces a limit."""


def of_shell(reply: dict[str, Any], stderr: bytes) -> dict[str, Any]:
    """Return the result of a shell command. If a limit stopped its child, exit code and last messages show which."""
    last = b"\n".join(stderr.rstrip().splitlines()[-8:]).lower()
    if reply["status"] == "timeout" and b"fork: retry: resource temporarily unavailable" in last:
        return {
            **reply,
            "status": "process_limit",
            "detail": "processes",
        }  # bash retries until others end
    if reply["status"] != "exit":
        return reply
    if reply["exit"] - 128 in _SIGNALS:
        return {**reply, **_SIGNALS[reply["exit"] - 128]}
    for words, note in _MESSAGES:
        if words in last:
            name, _, detail = note.partition(" ")
            return {
                **reply,
                "status": name,
                "detail": detail or (full_detail() if name == "disk_limit" else ""),
            }
    return reply


def result(
    reason: str, status: int, used: float, limits: dict[str, Any], note: str
) -> dict[str, Any]:
    """Return the result of a process that ended, or was killed for `reason` (see execution.supervise)."""
    if reason not in ("exited", "invalid"):
        name, _, detail = reason.partition(":")
        return {"status": name, "detail": detail}
    if reason == "invalid":
        return {"status": "crashed", "detail": _INVALID}
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


def explain_silence(answers: list[list[Any]], late: bool) -> list[Any]:
    """Return the answer for calls after the last of `answers`: no state or time was left, or the code left them out."""
    if answers and answers[-1][0] == "state_lost":
        return ["state_lost", "", "", 0]
    return ["timeout", "budget", "", 0] if late else ["crashed", _INVALID, "", 0]
