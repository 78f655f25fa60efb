"""Watching one execution: its output (capped), its end, its limits; and ending everything else in a box."""

from __future__ import annotations

import _socket as socket
import os
import select
import signal
import time
from typing import Any

import confine
import files
import memory
import wire

FLOOD = 16 << 20
"""Bytes of output after which an execution is killed."""
_TICK = 0.1
_QUICK = 0.02
"""Seconds in which output is left in its pipes: most executions end before that, and are drained at their end."""
_QUIET = 0.05
"""Seconds in which nobody starts as many processes as there are numbers for them."""
FRAME, LATE = 2.0, 0.5
"""Seconds that a question takes at most to be taken, and an answer from its first byte on; and after the wall limit,
before the host gives up."""
_RDHUP = 0x2000
_PIPE = 65536


class Capture:
    """Keeps the first and the last half of `cap` bytes of a stream and counts the rest."""

    def __init__(self, fd: int, cap: int) -> None:
        self.fd, self.half = fd, max(1, cap // 2)
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()

    def feed(self, data: bytes) -> None:
        """Takes the next piece of the stream."""
        self.total += len(data)
        room = self.half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self.half:
                del self._tail[: -self.half]

    def clear(self) -> None:
        """Forgets what was captured."""
        self.total = 0
        self._head.clear()
        self._tail.clear()

    @property
    def left_out(self) -> int:
        """How many bytes in the middle are not kept."""
        return self.total - len(self._head) - min(len(self._tail), self.half)

    def text(self) -> bytes:
        """What is kept, with a line in the middle that says how much is not."""
        tail = self._tail[-self.half :]
        if not self.left_out:
            return bytes(self._head + tail)
        return bytes(self._head + b"\n[... %d bytes left out ...]\n" % self.left_out + tail)


class Job:
    """One execution that is being watched."""

    def __init__(
        self,
        host: socket.socket,
        pid: int,
        pidfd: int,
        captures: tuple[Capture, Capture],
        limits: dict[str, Any],
        tree: Tree,
        began: float = 0.0,
    ) -> None:
        self.host, self.pid, self.pidfd, self.captures, self.limits = host, pid, pidfd, captures, limits
        self.tree = tree
        self.started = self.since = began or time.monotonic()
        self.deadline = self.started + limits["wall"]
        self._looked = self.started
        self._cpu_before: float | None = None

    def restart(self, end: float) -> None:
        """Fresh limits of wall and CPU time for the next call, the first not later than `end`."""
        self.since = time.monotonic()
        self.deadline = min(self.since + self.limits["wall"], end)
        self._cpu_before = None

    def cpu(self, pids: list[int]) -> float:
        """CPU seconds of the box since the first look, all its processes; most executions end before that."""
        times = os.times()
        now = times.children_user + times.children_system + sum(map(memory.cpu_seconds, pids))
        if self._cpu_before is None:
            self._cpu_before = now
        return max(0.0, now - self._cpu_before)

    def over(self) -> str:
        """The limit that is exceeded, or nothing; looked at ten times a second."""
        now = time.monotonic()
        if now >= self.deadline:
            return "timeout:wall"
        if self.captures[0].total + self.captures[1].total > FLOOD:
            return "output_limit:"
        if now - self._looked >= _TICK:
            self._looked = now
            pids = self.tree.pids()
            if self.cpu(pids) > self.limits["cpu"]:
                return "timeout:cpu"
            if self.tree.exceeds(self.limits["memory_mb"] << 20, pids, self.deadline):
                return "memory:processes together"
            if full := self.tree.too_full(self.limits, pids):
                return f"disk_limit:{full}"
        return ""

    def drain(self, discard: bool = False) -> None:
        """Reads what the pipes still hold, without waiting."""
        for capture in self.captures:
            size = _PIPE
            while capture.total <= FLOOD and size == _PIPE:  # less, and it is empty
                try:
                    data = os.read(capture.fd, _PIPE)
                except BlockingIOError:
                    break
                capture.feed(data)
                size = len(data)
            if discard:
                capture.clear()

    def reply(self, header: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The answer to the host: header and output."""
        out, err = self.captures[0].text(), self.captures[1].text()
        header["seconds"] = round(time.monotonic() - self.started, 6)
        header["out"], header["cut"] = len(out), any(capture.left_out for capture in self.captures)
        return header, out + err


def waiting(host: socket.socket, pidfd: int, control: socket.socket | None) -> select.poll:
    """What ends the wait for a process: its own end, that of the host, or an answer."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(host, _RDHUP)
    if control is not None:
        poll.register(control, select.POLLIN)
    return poll


def watch(job: Job, control: socket.socket | None, first: select.poll | None = None) -> tuple[str, wire.Frame | None]:
    """Waits until the process ends, answers on `control`, or exceeds a limit.

    Returns the reason (`exited`, `answered`, `deaf` for nonsense, or a limit) and the answer. Ends the process where
    the host is gone. `first`: `waiting` for the same, where it was made before.
    """
    first = first or waiting(job.host, job.pidfd, control)
    ready = {fd for fd, _ in first.poll(max(0.0, min(_QUICK, job.deadline - time.monotonic())) * 1000)}
    by_fd = {capture.fd: capture for capture in job.captures}
    poll: select.poll | None = None
    while True:
        if not ready:
            if poll is None:
                poll = waiting(job.host, job.pidfd, control)
                for fd in by_fd:
                    poll.register(fd, select.POLLIN)
            reason = job.over()
            if reason:
                return reason, None
            wait = min(job.deadline - time.monotonic(), _TICK)
            ready = {fd for fd, _ in poll.poll(max(0.0, wait) * 1000 + 1)}
        if job.host.fileno() in ready:
            raise SystemExit(0)
        for fd in ready & by_fd.keys():
            data = os.read(fd, 65536)
            if data:
                by_fd[fd].feed(data)
            elif poll:
                poll.unregister(fd)
        if control is not None and control.fileno() in ready:
            try:
                received = wire.receive(control, min(time.monotonic() + FRAME, job.deadline + LATE))
            except (wire.Broken, OSError, ValueError):
                return "deaf", None
            if received is not None:
                return "answered", received
            if poll:
                poll.unregister(control)
            control = None
        if job.pidfd in ready:
            return "exited", None
        ready = set()


def reap() -> None:
    """Collects the children that ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _reap_all() -> None:
    """Waits until what was killed is gone, at most a second: until then it counts among the user's processes.

    Else the next execution would be told that it has too many.
    """
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.0005)
        except ChildProcessError:
            return


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _has_threads(pid: int) -> bool:
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


class Tree:
    """The processes of a box: everything in its pid namespace (`ns`), or its descendants, orphans included."""

    def __init__(self, level: str, user: tuple[int, int] | None = None) -> None:
        self.level, self.user = level, user
        self.me = os.getpid()
        self.ended: set[int] = set()
        """Processes that the box killed for its own reasons: they count for no execution."""
        self.checkpoint = 0
        """The same of the last execution's checkpoint."""
        self.template = 0
        """And of the process that forks programs; it ends with whatever else is ended."""
        self._loadavg = os.open("/proc/loadavg", os.O_RDONLY) if level == "ns" else -1
        self._before = self._seen = 1
        """Its last number when the execution of now began, and when the one before it ended; first that of the init."""
        self._marked = 0.0
        self._loud = level != "ns"
        self.look()

    def _last_pid(self) -> int:
        """The pid that was given out last in this pid namespace."""
        return int(os.pread(self._loadavg, 100, 0).split()[-1])

    def mark(self) -> None:
        """An execution of the session begins."""
        if self.level == "ns":
            self._marked = time.monotonic()
            self._before = self._last_pid()
            self._loud = self._loud or self._before != self._seen  # a head went on after its answer
            self.checkpoint = self._before + 1  # the first that a head starts

    def look(self) -> None:
        """Nothing of the code's runs now but what stays."""
        if self.level == "ns":
            self._seen = self._last_pid()

    def still(self, protected: set[int]) -> None:
        """Ends what was started after the last execution; outside of namespaces nothing could start anything."""
        if self.level == "ns" and self._last_pid() != self._seen:
            self.kill_others(protected)

    def quiet(self, protected: set[int]) -> bool:
        """Whether it started nothing but its checkpoint, so that there is nothing to look for; once loud, for ever.

        Numbers begin anew when they are used up, so what took long enough for that is looked at.
        """
        if self._loud:
            return False
        self._seen = last = self._last_pid()
        if last == self._before + 1 and last not in protected:
            # The first that a head starts is its checkpoint. Whatever it is, it ends here; the head waits for it later.
            signal_process(last, signal.SIGKILL)
        self._loud = not self._before <= last <= self._before + 1
        if time.monotonic() - self._marked <= _QUIET:
            return not self._loud
        self._loud = self._loud or any(map(_has_threads, protected))
        return False

    def alone(self, pid: int) -> bool:
        """Whether nothing was started besides this process, which has ended and was not waited for yet, and a template.

        So its number is taken, and the one that was given out last is its own only where there was no other since.
        """
        expected = self._seen + (2 if self.template == self._seen + 1 else 1)
        self._seen = self._last_pid() if self.level == "ns" else -1
        return self._seen == pid == expected

    def pids(self) -> list[int]:
        """The processes of the box, without its init."""
        if self.level == "ns":
            return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != self.me]
        found: list[int] = []
        queue = [self.me]
        while queue:
            for child in children(queue.pop()):
                found.append(child)
                queue.append(child)
        return found

    def exceeds(self, limit: int, pids: list[int], until: float) -> bool:
        """Whether these processes of the box hold more than `limit` bytes, files left out; see memory.exceeds."""
        with confine.acting_as(self.user):
            return memory.exceeds([pid for pid in pids if pid != self.template], limit, until)

    def too_full(self, limits: dict[str, Any], pids: list[int]) -> str:
        """What the work folder holds too much of, where no file system of its own limits it; else nothing."""
        if self.level == "ns" or (self.level == "uid" and not limits.get("watch_disk")):
            return ""
        with confine.acting_as(self.user):
            return files.too_full(limits, pids)

    def halt(self) -> bool:
        """Stops everything in the box but its init at once, where that can be done; else does nothing.

        What ends a box then has the cores for itself, however many processes of a fork bomb want them.
        """
        return self._signal_all(signal.SIGSTOP)

    def _signal_all(self, number: int) -> bool:
        """A signal to everything in the box but its init at once: pid 1 of a namespace, and root by user, can do so."""
        try:
            if self.user:
                confine.signal_user(self.user[0], number)
            elif self.level == "ns":
                os.kill(-1, number)
        except ProcessLookupError:
            return False
        return self._reaches_all

    @property
    def _reaches_all(self) -> bool:
        return bool(self.user) or self.level == "ns"

    def kill_others(self, protected: set[int]) -> int:
        """Ends every process but the init and the protected ones; returns how many of the code's still ran."""
        count = len(self._kill_others(protected) - self.ended - {self.checkpoint, self.template})
        self.ended.clear()
        self.template = 0
        self.look()
        return count

    def _kill_others(self, protected: set[int]) -> set[int]:
        found: set[int] = set()
        if not protected and self._reaches_all:
            found = {pid for pid in self.pids() if _alive(pid)}
            self._signal_all(signal.SIGKILL)
            _reap_all()
            return found
        for attempt in range(200):
            others = [pid for pid in self.pids() if pid not in protected and _alive(pid)]
            if not others:
                break
            found.update(others)
            # Stopped first: a fork bomb would outrun killing.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in others:
                    signal_process(pid, number)
            reap()
            if attempt > 3:
                time.sleep(0.002)
        reap()
        return found


def children(pid: int) -> list[int]:
    """The children of a process."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:
        return found
    return found


def signal_process(pid: int, number: int) -> None:
    """A signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
