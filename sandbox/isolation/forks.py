"""Forks: into new namespaces, without the interpreter's own work, asleep, or as a sibling."""

from __future__ import annotations

import _imp
import _thread
import ctypes
import os
import signal
import sys
from functools import partial

from sandbox.isolation.libc import check, libc

# PyDLL keeps the interpreter's lock during a call: a forked child wakes up holding it.
_locked_libc = ctypes.PyDLL(None, use_errno=True)
_BYTE = ctypes.create_string_buffer(1)

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_CLONE_CLEARTID, _CLONE_SETTID = 0x00200000, 0x01000000
_SYS_CLONE = 56 if os.uname().machine == "x86_64" else 220
_PR_GET_TID_ADDRESS = 40
ANY_KIND = 0x40000000
"""__WALL of waitpid(2): includes children that send no signal when they end."""


def namespaces_fork() -> int:
    """Forks a child that has user, pid, mount, ipc and network namespaces of its own. Raises OSError."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    flags = _NEWUSER | _NEWPID | _NEWNS | _NEWIPC | _NEWNET | signal.SIGCHLD
    pid = int(_locked_libc.syscall(_SYS_CLONE, flags, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone into new namespaces: {os.strerror(number)}")
    return pid


def bare_fork() -> int:
    """Forks without the interpreter's own work around it, which costs more than the fork. Raises OSError.

    Only for a process with a single thread, whose child needs no at-fork hooks.
    """
    return check(int(_locked_libc.fork()), "fork")


def sleeping_fork(fd: int) -> int:
    """Forks a child that sleeps until a byte arrives on `fd`, and exits when `fd` is closed. Raises OSError.

    Returns the child's pid, and 0 in the child once it is woken. The child touches next to no memory while it sleeps.
    It sends no signal when it ends, so code that waits for any child does not see it: wait for it with ANY_KIND.
    """
    # Only clone can leave out the signal, and only fork takes the C library's locks, which other threads may hold.
    alone = (
        _thread._count() == 0 or len(sys._current_frames()) == 1
    )  # _count is quicker, but includes earlier threads
    # Without the at-fork hooks: the code must not notice this fork. The child's PyOS_AfterFork_Child releases the lock.
    _imp.acquire_lock()
    pid = int(_silent_fork() if alone else _locked_libc.fork())
    if pid == 0:
        if _locked_libc.read(fd, _BYTE, 1) != 1:
            _locked_libc._exit(0)
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    _imp.release_lock()
    return check(pid, "fork")


def _clone_arguments() -> tuple[int, ...]:
    """Arguments that make clone the C library's fork, without the signal to the parent at its end.

    prctl reports where the C library keeps its thread id, the same address in every fork. On a kernel without that
    option the child keeps its parent's id there, which only locks shared between processes would notice.
    """
    address = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) != 0:
        return 0, 0, 0, 0, 0
    place = (0, address, 0) if os.uname().machine == "x86_64" else (0, 0, address)
    return _CLONE_SETTID | _CLONE_CLEARTID, 0, *place


_silent_fork = partial(_locked_libc.syscall, _SYS_CLONE, *_clone_arguments())
"""Sends no signal when the child ends."""
