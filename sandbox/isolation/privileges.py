"""Gives up rights: capabilities, system calls, files (Landlock)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial

from sandbox.isolation import landlock, seccomp
from sandbox.isolation.libc import (
    PR_CAPBSET_DROP,
    PR_CHILD_SUBREAPER,
    PR_DUMPABLE,
    PR_NO_NEW_PRIVS,
    check,
    libc,
    prctl,
    write,
)

_CAPABILITY_VERSION = 0x20080522
_code_filter = b""


def drop(program: bytes) -> None:
    """Gives up every capability for good, then installs the system-call filter."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    check(libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")
    install_filter(program)
    set_dumpable(False)


def install_filter(program: bytes) -> None:
    """Puts the system-call filter on this process and every process it will start."""
    prctl(PR_NO_NEW_PRIVS, 1)
    seccomp.install(program)


def prepare_code_filter(level: str, grading: bool) -> None:
    """Builds the second filter once, before any child would build it again; see seccomp.build_for_code."""
    global _code_filter
    _code_filter = seccomp.build_for_code(counted=level in ("ns", "uid"), grading=grading)


def install_code_filter() -> None:
    """Puts the second filter on a process that is about to run code."""
    seccomp.install(_code_filter)


def restrict(rules: int) -> None:
    """Puts this process under Landlock rules."""
    landlock.restrict(rules)
    os.close(rules)


def set_dumpable(value: bool) -> None:
    """Opens this process's memory to other processes of its user, or closes it."""
    prctl(PR_DUMPABLE, int(value))


def dumpable() -> Callable[[], int]:
    """Return a function that opens this process's memory to other processes of its user, as cheaply as possible."""
    return partial(libc.prctl, PR_DUMPABLE, 1, 0, 0, 0)


def prefer_for_oom_kill() -> None:
    """Makes the kernel kill this process before the sandbox's own if a cgroup or container runs out of memory."""
    write("/proc/self/oom_score_adj", "500")


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants."""
    prctl(PR_CHILD_SUBREAPER, 1)
