"""What the end of a process means: one of the closed set of results. A worker's word chooses only among the model's."""

from __future__ import annotations

import os
import signal
from typing import Any

_CLAIMS = frozenset({"ok", "exception", "exit", "memory", "disk_limit", "process_limit", "blocked"})


def claimed(header: dict[str, Any]) -> str:
    """The status that a worker claims, if it is one that it may choose."""
    status = header.get("status")
    return status if isinstance(status, str) and status in _CLAIMS else "exception"


def texts(header: dict[str, Any]) -> tuple[str, str]:
    """Detail and error text of an answer, cut to size."""
    return str(header.get("detail", ""))[:200], str(header.get("error", ""))[:300]


def number(text: str) -> int:
    """An exit code that a worker claims."""
    return int(text) & 0xFF if text.isdecimal() and len(text) < 10 else 1


def read_note(fd: int) -> str:
    """What a program's process wrote about its end."""
    try:
        return os.read(fd, 200).decode("utf-8", "replace")
    except BlockingIOError:
        return ""


def ended(reason: str, status: int, used: float, limits: dict[str, Any], note: str) -> dict[str, Any]:
    """The result of a process that ended, or was killed for `reason`."""
    if reason not in ("exited", "deaf"):
        name, _, detail = reason.partition(":")
        return {"status": name, "detail": detail}
    if reason == "deaf":
        return {"status": "crashed", "detail": "the session's process answered nonsense"}
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and used >= limits["cpu"]):
            return {"status": "timeout", "detail": "cpu"}
        if number == signal.SIGXFSZ:
            return {"status": "disk_limit", "detail": "a file is too large"}
        return {"status": "crashed", "signal": number}
    code = os.WEXITSTATUS(status)
    name, _, detail = note.partition(" ")
    if name in _CLAIMS and code:
        return {"status": name, "detail": detail[:200], "exit": code}
    return {"status": "exit" if code else "ok", "exit": code}
