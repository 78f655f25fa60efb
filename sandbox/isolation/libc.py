"""The C library, and the calls of it that several modules share."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)

PR_DUMPABLE, PR_CAPBSET_DROP, PR_CHILD_SUBREAPER, PR_NO_NEW_PRIVS = 4, 24, 36, 38


def check(result: int, call: str) -> int:
    """Returns a call's result; raises OSError if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    """Calls prctl(2) with one argument; raises OSError."""
    check(libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def write(path: str, text: str) -> None:
    """Writes a file of the kernel with one system call."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
