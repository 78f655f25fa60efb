"""The identity of the process that works on a run, and whether it is alive.

A process id is reused after its process ends. With the start time of the process, the boot of its machine and its
process namespace it identifies one process for good. A process on another machine or in another container is judged
by its heartbeat.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

STALE = 120.0
"""Seconds without a heartbeat until a process that cannot be looked up counts as dead."""

CLOCK = 2.0
"""Seconds by which the start of a process may be off: the boot of its machine is known to the second."""

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Holder:
    """One process, identified for good."""

    pid: int
    pid_started: str
    """When it started: clock ticks since boot on Linux, a date elsewhere; empty if unknown."""
    boot: str
    """The boot of its machine and its process namespace; empty if unknown."""
    host: str

    @classmethod
    def of(cls, pid: int | None = None) -> Holder:
        """Return the holder for a process of this machine, by default this process."""
        pid = pid or os.getpid()
        return cls(pid, start_of(pid) or "", boot(), platform.node())

    def lives(self, heartbeat: float) -> bool:
        """Whether the process is alive; `heartbeat` decides only if it cannot be looked up from here.

        Of an old row only the number is known: a process that began after its last heartbeat is another one.
        """
        if self.pid and self.host == platform.node() and self.boot in ("", boot()):
            started = start_of(self.pid)
            if started is None:
                return False
            if self.pid_started:
                return started == self.pid_started
            return _seconds(started) <= heartbeat + CLOCK
        return time.time() - heartbeat < STALE


def start_of(pid: int) -> str | None:
    """Return the start time of a process of this machine; None if absent, or if only its exit status is left."""
    if not _PROC.joinpath("self", "stat").exists():
        return _start_by_ps(pid)
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The program's name before the last bracket may contain anything.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZXx" else fields[18]


def _seconds(started: str) -> float:
    """Return a start time of `start_of` in seconds since the epoch."""
    if not started.isdigit():
        return time.mktime(time.strptime(started))
    since = next(
        line
        for line in (_PROC / "stat").read_text("utf-8").splitlines()
        if line.startswith("btime ")
    )
    return int(since.split()[1]) + int(started) / os.sysconf("SC_CLK_TCK")


@functools.cache
def boot() -> str:
    """Return the boot of this machine and the process namespace of this process; empty if the
    system reports neither.
    """
    try:
        name = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text("utf-8").strip()
        return f"{name} {(_PROC / 'self' / 'ns' / 'pid').readlink()}"
    except OSError:
        return ""


def _start_by_ps(pid: int) -> str | None:
    """Return `start_of` without /proc, as on macOS."""
    found = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, started = found.stdout.strip().partition(" ")
    return None if found.returncode or state.startswith("Z") else started.strip()
