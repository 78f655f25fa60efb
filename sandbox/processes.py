"""The processes of a box: which there are, whether the code started any, and how they are ended.

Their memory use is here too, and whose memory caused an out-of-memory kill.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from sandbox.filesystem import files
from sandbox.isolation import namespaces

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
        self._before = self._marked = self._read()

    def mark(self) -> None:
        """Marks the begin of an execution. A shared count, slow to read, is compared with the last reading instead."""
        if not self.exact:
            return
        if len(self.fds) > 1:  # the peak first: a kill in between belongs to no execution
            os.pwrite(self.fds[1], b"0", 0)
        self._before = self._marked = self._read()

    def _read(self) -> bytes:
        return os.pread(self.fds[0], 65536, 0) if self.fds else b""

    def _full(self) -> bool:
        """Whether the box met its own limit since `mark`.

        Not since the last kill: of several in a burst one may be counted a moment after the limit was met.
        """
        if len(self.fds) == 1:
            return _number(self._before, b"oom") > _number(self._marked, b"oom")
        peak, limit = (int(os.pread(fd, 32, 0)) for fd in self.fds[1:])
        return peak >= limit - _CLOSE

    def since(self, over: bool, killed: bool) -> str:
        """Return whose memory caused a kill since the last call or `mark`: `own`, `others`, or empty without a kill.

        Without a cgroup, `over` (the box held more than its limit, as far as is known) and `killed` (SIGKILL ended the
        execution) decide.
        """
        before, self._before = self._before, self._read()
        if self._before == before or _number(self._before, b"oom_kill") <= _number(
            before, b"oom_kill"
        ):
            return ""
        if self.exact:
            return "own" if self._full() else "others"
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


def _reap() -> None:
    """Reaps the children that ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _reap_all() -> None:
    """Waits until the killed children have ended, at most a second: until then they count among the user's processes.

    Otherwise the next execution could meet the limit of processes.
    """
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.0005)
        except ChildProcessError:
            return


def _state(entry: str) -> bytes:
    """Return the state of a process, or of a thread, by its entry below /proc; X once it has ended."""
    try:
        with open(f"/proc/{entry}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b"X"


def _is_running(pid: int) -> bool:
    return _state(str(pid)) not in (b"Z", b"X")


def stop(pid: int) -> None:
    """Stops a process, and waits a moment for all its threads: a fork that has begun still makes a child."""
    signal_process(pid, signal.SIGSTOP)
    with suppress(OSError):  # it has ended
        for _ in range(200):
            threads = os.listdir(f"/proc/{pid}/task")
            if all(_state(f"{pid}/task/{one}") in (b"T", b"Z", b"X") for one in threads):
                return
            time.sleep(0.0001)


class ProcessTree:
    """The processes of a box: everything in its pid namespace (`ns`), or its descendants, orphans included."""

    def __init__(self, level: str, user: tuple[int, int] | None = None) -> None:
        self.level, self.user = level, user
        self.me = os.getpid()
        self.ended: set[int] = set()
        """Processes that the box killed for its own reasons; they count for no execution."""
        self.checkpoint = 0
        """The last execution's checkpoint, as its code claims; it counts for none either. 0 if absent."""

    def pids(self) -> list[int]:
        """Return the processes of the box, without its init."""
        if self.level == "ns":
            return [
                int(name)
                for name in os.listdir("/proc")
                if name.isdecimal() and int(name) != self.me
            ]
        found: list[int] = []
        queue = [self.me]
        while queue:
            for child in children(queue.pop()):
                found.append(child)
                queue.append(child)
        return found

    def exceeds(self, limit: int, pids: list[int], until: float) -> bool:
        """Whether these processes of the box hold more than `limit` bytes, without files; see exceeds."""
        with namespaces.acting_as(self.user):
            return exceeds(pids, limit, until)

    def too_full(self, limits: dict[str, Any], pids: list[int]) -> str:
        """Return the limit that the work folder exceeds if no file system limits it; empty if none."""
        if self.level == "ns" or (self.level == "uid" and not limits.get("watch_disk")):
            return ""
        with namespaces.acting_as(self.user):
            return files.too_full(limits, pids)

    def signal_all(self, number: int) -> bool:
        """Signals everything in the box but its init at once: pid 1 of a namespace, and root by user, can do so.

        Returns False if that is impossible. After SIGSTOP the init has the cores to itself, however many processes a
        fork bomb has.
        """
        if self.user:
            namespaces.signal_user(self.user[0], number)
        elif self.level == "ns":
            with suppress(ProcessLookupError):
                os.kill(-1, number)
        return bool(self.user) or self.level == "ns"

    def kill_others(self, protected: set[int]) -> int:
        """Ends every process but the init and the protected ones; returns how many of the code's were running."""
        count = len(self._kill_others(protected) - self.ended - {self.checkpoint})
        self.ended.clear()
        return count

    def _kill_others(self, protected: set[int]) -> set[int]:
        found: set[int] = set()
        if not protected:
            found = {pid for pid in self.pids() if _is_running(pid)}
            if self.signal_all(signal.SIGKILL):
                _reap_all()
                return found
        for attempt in range(200):
            others = [pid for pid in self.pids() if pid not in protected and _is_running(pid)]
            if not others:
                break
            found.update(others)
            # Stopped first: a fork bomb would outrun the killing.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in others:
                    signal_process(pid, number)
            _reap()
            if attempt > 3:
                time.sleep(0.002)
        _reap()
        return found


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:
        return found
    return found


def signal_process(pid: int, number: int) -> None:
    """Signals a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
