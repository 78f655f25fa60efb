"""Memory use of a box's processes, and attribution of out-of-memory kills."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CLOSE = 1 << 20
"""Bytes that a process may have requested at once when it met the limit."""
_TICKS = os.sysconf("SC_CLK_TCK")
_CONTAINER = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""A container's own count (cgroup version 2, version 1)."""


class OutOfMemoryKills:
    """The kernel's count of out-of-memory kills.

    `fds`: open files of the box's cgroup, `memory.events` (version 2), or `memory.oom_control`,
    `memory.max_usage_in_bytes` and `memory.limit_in_bytes` (version 1). Without them there is only the count of the
    container (if `contained`) or of the whole machine, which covers other processes too: it matters to an execution
    only if SIGKILL ended it.
    """

    def __init__(self, fds: list[int], contained: bool = False) -> None:
        self.exact = bool(fds)
        self.fds = fds
        for shared in () if fds else (*(_CONTAINER if contained else ()), "/proc/vmstat"):
            with suppress(OSError):
                self.fds = [os.open(shared, os.O_RDONLY)]
                break
        self._before = self._read()

    def mark(self) -> None:
        """Marks the begin of an execution. A shared count, slow to read, is compared with the last reading instead."""
        if self.exact:
            self._before = self._read()

    def _read(self) -> bytes:
        return os.pread(self.fds[0], 65536, 0) if self.fds else b""

    def _full(self, before: bytes) -> bool:
        """Whether the box met its own limit."""
        if len(self.fds) == 1:
            return _number(self._before, b"oom") > _number(before, b"oom")
        peak, limit = (int(os.pread(fd, 32, 0)) for fd in self.fds[1:])
        os.pwrite(self.fds[1], b"0", 0)
        return peak >= limit - _CLOSE

    def since(self, over: bool, killed: bool) -> str:
        """Return whose memory caused a kill since `mark`: `own`, `others`, or empty without a kill.

        Without a cgroup, `over` (the box held more than its limit, as far as is known) and `killed` (SIGKILL ended the
        execution) decide.
        """
        before, self._before = self._before, self._read()
        if self._before == before or _number(self._before, b"oom_kill") <= _number(
            before, b"oom_kill"
        ):
            return ""
        if self.exact:
            return "own" if self._full(before) else "others"
        return "own" if over else "others" if killed else ""


def _number(text: bytes, name: bytes) -> int:
    """Return the number in the line that begins with a name; 0 if absent."""
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0


def exceeds(pids: Iterable[int], limit: int, until: float) -> bool:
    """Whether processes hold more than `limit` bytes together, without files. False if that takes longer than `until`.

    `until`: by the monotonic clock. The exact sum waits for every process that is about to fork: with more of those
    than cores, one sum over a fork bomb would take seconds, longer than the host waits for the box.
    """
    found = list(pids)
    # The cheap sum includes files, and counts twice what a process shares with its checkpoint.
    if sum(map(_resident, found)) <= limit:
        return False
    total = 0
    for pid in found:
        if total > limit or time.monotonic() >= until:
            break
        total += _proportional(pid)
    return total > limit


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return sum(
                int(line.split()[1]) << 10
                for line in file
                if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
            )
    except ProcessLookupError:
        return 0
    except OSError:
        return _resident(pid)


def waits(pids: Iterable[int]) -> dict[tuple[int, str], float]:
    """Seconds that each thread of some processes has waited for a processor so far, where the kernel counts that."""
    found: dict[tuple[int, str], float] = {}
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):  # ended meanwhile
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                    found[pid, thread] = int(file.read().split()[1]) / 1e9
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its reaped children; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return sum(map(int, file.read().rpartition(b")")[2].split()[11:15])) / _TICKS
    except OSError:
        return 0.0
