"""One execution under supervision: its output (capped), its limits, its end."""

from __future__ import annotations

import _socket as socket
import os
import select
import time
from typing import Any

from sandbox import processes
from sandbox.processes import ProcessTree
from sandbox.protocol import framing

FLOOD = 16 << 20
"""Bytes of output after which an execution is killed."""
_TICK = 0.1
_LEAST = 0.02
"""Seconds of waiting for a processor for which a deadline is moved."""
FRAME, LATE = 2.0, 0.5
"""Seconds: to send a request or receive an answer from its first byte on; and after the wall limit, before the host
gives up."""
BUSY = 20.0
"""An execution lasts at most so many times its wall limit, however busy the machine is."""
_RDHUP = 0x2000
_PIPE = 65536


class Capture:
    """Keeps the first and the last half of `cap` bytes of a stream and counts the rest."""

    def __init__(self, fd: int, cap: int) -> None:
        self.fd, self.half = fd, max(1, cap // 2)
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()

    def feed(self, data: bytes) -> None:
        """Adds the next piece of the stream."""
        self.total += len(data)
        room = self.half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self.half:
                del self._tail[: -self.half]

    def drain(self) -> None:
        """Reads the rest of the pipe, without waiting."""
        size = _PIPE
        while self.total <= FLOOD and size == _PIPE:  # a short read empties the pipe
            try:
                data = os.read(self.fd, _PIPE)
            except BlockingIOError:
                return
            self.feed(data)
            size = len(data)

    @property
    def left_out(self) -> int:
        """Number of bytes left out of the middle."""
        return self.total - len(self._head) - min(len(self._tail), self.half)

    def text(self) -> bytes:
        """Return the kept bytes, with a line in the middle with the number left out."""
        tail = self._tail[-self.half :]
        if not self.left_out:
            return bytes(self._head + tail)
        return bytes(self._head + b"\n[... %d bytes left out ...]\n" % self.left_out + tail)


class Execution:
    """One execution under supervision."""

    def __init__(
        self,
        host: socket.socket,
        pid: int,
        pidfd: int,
        captures: tuple[Capture, Capture],
        limits: dict[str, Any],
        tree: ProcessTree,
        began: float = 0.0,
    ) -> None:
        self.host, self.pid, self.pidfd, self.captures, self.limits = (
            host,
            pid,
            pidfd,
            captures,
            limits,
        )
        self.tree = tree
        self.started = began or time.monotonic()
        self.deadline = self.started + limits["wall"]
        self._looked = self.started
        self._cpu_before: float | None = None
        self._used = 0.0
        self._waits: dict[tuple[int, str], float] = {}
        """Seconds that each thread of the box had waited for a processor at the last look."""
        self._began, self._longest = self.started, 0.0
        """When the limits began, and the seconds since then that the thread waited which waited longest."""
        self.forgiven = self._moved = 0.0
        """Seconds by which the deadline was moved, since others had the processors: in all, and since `_began`."""

    def restart(self, end: float) -> None:
        """Sets fresh limits of wall and CPU time for the next call; the deadline is not later than `end`, as moved."""
        self._forgive()
        self._began = time.monotonic()
        self._longest = self._moved = 0.0
        self.deadline = min(self._began + self.limits["wall"], end + self.forgiven)
        self._cpu_before, self._used = None, 0.0

    def cpu(self, pids: list[int]) -> float:
        """Return the CPU seconds of all processes of the box since the first look; most executions end before one."""
        times = os.times()
        now = times.children_user + times.children_system + sum(map(processes.cpu_seconds, pids))
        if self._cpu_before is None:
            self._cpu_before = now
        return max(0.0, now - self._cpu_before)

    def check_limits(self) -> str:
        """Return the exceeded limit as `status:detail`; empty if none. Checked ten times a second."""
        now = time.monotonic()
        if self.captures[0].total + self.captures[1].total > FLOOD:
            return "output_limit:"
        if now - self._looked >= _TICK or now >= self.deadline:
            pids = self.tree.pids()
            used = self.cpu(pids)
            self._wait(now - self._looked, pids)
            self._looked, self._used = now, used
            if now >= self.deadline and not self._forgive():
                return "timeout:wall"
            if used > self.limits["cpu"]:
                return "timeout:cpu"
            if self.tree.exceeds(self.limits["memory_mb"] << 20, pids, self.deadline):
                return "memory:processes together"
            if full := self.tree.too_full(self.limits, pids):
                return f"disk_limit:{full}"
        return ""

    def _wait(self, elapsed: float, pids: list[int]) -> None:
        """Adds the seconds since the last look that the thread waited for a processor which waited longest."""
        waits = processes.waits(pids)
        longest = max(
            (seconds - self._waits.get(thread, 0.0) for thread, seconds in waits.items()),
            default=0.0,
        )
        # A session's process has waited before this execution too.
        self._longest += longest if self._waits else min(longest, elapsed)
        self._waits = waits

    def _waited(self) -> float:
        """Return the seconds of waiting for others that the deadline was not moved by so far.

        The kernel counts a wait when it ends, so waiting is compared with the whole time, not from look to look. While
        the box itself computes, in many processes, it waits for itself.
        """
        free = time.monotonic() - self._began - self._used
        room: float = (BUSY - 1) * self.limits["wall"]
        return max(0.0, min(self._longest, free, room) - self._moved)

    def _forgive(self) -> bool:
        """Moves the deadline by the seconds waited for a processor, and informs the host. False if there were none."""
        more = self._waited()
        if more < _LEAST:
            return False
        self.deadline += more
        self.forgiven += more
        self._moved += more
        framing.send(self.host, {"more": round(more, 3)})
        return True

    def reply(self, header: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer to the host: header and output."""
        out, err = self.captures[0].text(), self.captures[1].text()
        header["seconds"] = round(
            max(0.0, time.monotonic() - self.started - self.forgiven - self._waited()), 6
        )
        header["out"], header["cut"] = len(out), any(capture.left_out for capture in self.captures)
        return header, out + err


def supervise(job: Execution, control: socket.socket | None) -> tuple[str, framing.Frame | None]:
    """Waits until the process ends, answers on `control`, or exceeds a limit.

    Returns the reason (`exited`, `answered`, `invalid` for an answer that breaks the protocol, or a limit) and the
    answer. Raises SystemExit if the host closed its socket.
    """
    by_fd = {capture.fd: capture for capture in job.captures}
    poll = select.poll()
    poll.register(job.host, _RDHUP)
    for source in (job.pidfd, *by_fd, *([control.fileno()] if control else [])):
        poll.register(source, select.POLLIN)
    while True:
        if reason := job.check_limits():
            return reason, None
        wait = min(job.deadline - time.monotonic(), _TICK)
        ready = {fd for fd, _ in poll.poll(max(0.0, wait) * 1000 + 1)}
        if job.host.fileno() in ready:
            raise SystemExit(0)
        for fd in ready & by_fd.keys():
            if data := os.read(fd, _PIPE):
                by_fd[fd].feed(data)
            else:
                poll.unregister(fd)
        if control is not None and control.fileno() in ready:
            until = min(time.monotonic() + FRAME, job.deadline + LATE)
            try:
                received = framing.receive(control, until, framing.MAX_ANSWER)
            except (framing.Broken, OSError, ValueError):
                return "invalid", None
            if received is not None:
                return "answered", received
            poll.unregister(control)
            control = None
        if job.pidfd in ready:
            return "exited", None
