"""The processes that hold a session's state: the one of now, and earlier ones that are kept to go back to."""

from __future__ import annotations

import _socket as socket
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import snapshot
import wire
from watch import FRAME, signal_process, waiting

_CREDENTIALS = struct.Struct("3i")
_PAUSE, _MOMENT = 100, 2
"""Milliseconds."""


class Head:
    """The process that holds a session's state."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self.pidfd = os.pidfd_open(pid)
        self.stopped = False
        self.line: socket.socket | None = None
        """Our end of what its next checkpoint sleeps on, where it has the other one."""
        self._end = select.poll()
        self._end.register(self.pidfd, select.POLLIN)
        self._events: select.poll | None = None  # made once: every cell waits for the same

    def ended(self) -> bool:
        """Whether the process is gone."""
        return bool(self._end.poll(0))

    def answers(self) -> bool:
        """Whether a kept state goes on: the code may have killed it, and it may still be on its way out."""
        signal_process(self.pid, signal.SIGCONT)  # it was stopped, by us or by the code
        try:
            until = time.monotonic() + FRAME
            wire.say(self.control, {"op": "cell", "nonce": ""}, until=until)  # it has no line yet, and asks for one
            answer = wire.receive(self.control, until)
        except (OSError, wire.Broken):
            return False
        return answer is not None and "line" in answer.header

    def events(self, host: socket.socket) -> select.poll:
        """What an execution waits for but for its output: an answer, the end of the process, or of the host."""
        if self._events is None:
            self._events = waiting(host, self.pidfd, self.control)
        return self._events

    def lend(self) -> tuple[socket.socket, list[int]]:
        """Our end of what the next checkpoint sleeps on, to be given back; with the other one where it has none yet."""
        line, self.line = self.line, None
        if line:
            return line, []
        ours, theirs = wire.pair()
        return ours, [theirs.detach()]

    def close(self) -> None:
        os.close(self.pidfd)
        self.control.close()
        if self.line:
            self.line.close()


def hear(host: socket.socket, head: Head | None, idle: Callable[[], None]) -> bytes:
    """What the host sends next. A head that is asked nothing for a while sleeps, and `idle` sees to what it started.

    Its code may go on after it has answered: in a handler of a timer's signal, or in place of ours.
    """
    if head and not head.stopped:
        poll = select.poll()
        poll.register(host, select.POLLIN)
        if not poll.poll(_PAUSE):
            signal_process(head.pid, signal.SIGSTOP)
            head.stopped = True
            poll.poll(_MOMENT)  # until it does
            idle()
    return host.recv(1 << 16)  # more would be a mapping of its own, made and given back every time


class Checkpoint(NamedTuple):
    """The state before one request of the host."""

    files: snapshot.Snapshot | None
    head: Head | None
    """None where the request changed no variables: they are those of the next checkpoint, or of now."""
    cells: int


class Kept:
    """Earlier states by the host's number of the request before which they were. `limit`: bytes of files together.

    `ended` takes the processes that it kills, which may be on their way out for a moment.
    """

    def __init__(self, limit: int, ended: set[int]) -> None:
        self.limit, self.ended = limit, ended
        self.most = 0
        """As many as are wanted: a head is allowed them at its start, since it cannot be allowed more later."""
        self._states: dict[int, Checkpoint] = {}

    def __len__(self) -> int:
        return len(self._states)

    def pids(self) -> set[int]:
        """The processes that wait."""
        return {state.head.pid for state in self._states.values() if state.head}

    def calm(self, head: Head | None, halted: bool) -> None:
        """After a program: what slept sleeps, though the program woke it, and a head that was halted goes on."""
        if head and (head.stopped or halted):
            signal_process(head.pid, signal.SIGSTOP if head.stopped else signal.SIGCONT)
        for pid in self.pids():
            signal_process(pid, signal.SIGSTOP)

    def add(self, header: dict[str, Any], files: snapshot.Snapshot | None, head: Head | None, cells: int) -> None:
        """Keeps the state before a request, at most `keep` of them; the oldest go first."""
        self._states[header["call"]] = Checkpoint(files, head, cells)
        while len(self) > header["keep"] or (
            len(self) > 1 and snapshot.held([state.files for state in self._states.values()]) > self.limit
        ):
            self._forget(min(self._states))

    def add_running(
        self, backup: socket.socket, header: dict[str, Any], files: snapshot.Snapshot | None, cells: int
    ) -> None:
        """Keeps the state that the checkpoint at the other end of `backup` holds."""
        if head := adopt(backup):
            signal_process(head.pid, signal.SIGSTOP)  # its code could go on in place of ours
            self.add(header, files, head, cells)
        else:
            self.clear()  # what was kept before has no way past this request

    def back(self, number: int) -> Checkpoint | None:
        """The state before a request, with the head that holds it, if another than that of now; later ones go."""
        wanted = self._states.get(number)
        if wanted is None:
            return None
        later = sorted(other for other in self._states if other >= number)
        holder = next((other for other in later if self._states[other].head), None)
        head = self._states.pop(holder).head if holder is not None else None
        for other in later:
            if other != holder:
                self._forget(other)
        return wanted._replace(head=head)

    def clear(self) -> None:
        """Forgets all."""
        for number in list(self._states):
            self._forget(number)

    def _forget(self, number: int) -> None:
        head = self._states.pop(number).head
        if head:
            signal_process(head.pid, signal.SIGKILL)
            self.ended.add(head.pid)
            head.close()


def adopt(backup: socket.socket) -> Head | None:
    """The checkpoint at the other end: the kernel says which process greets. None where there is none."""
    try:
        backup.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        wire.patience(backup)
        with suppress(BlockingIOError):  # what the code wrote to it, which had it in reach
            backup.recv(1 << 20, socket.MSG_DONTWAIT)
        backup.send(b"\0")  # wakes it
        # At one read, as it is sent: more would be more time than the host waits.
        data, ancillary, _, _ = backup.recvmsg(wire.PREFIX.size + 64, socket.CMSG_SPACE(_CREDENTIALS.size))
        if len(data) < wire.PREFIX.size or not ancillary:
            raise OSError("the checkpoint is gone")
        head_size, body_size = wire.PREFIX.unpack_from(data)
        if body_size or len(data) != wire.PREFIX.size + head_size:
            raise OSError("no greeting")
        pid = _CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[0]
        backup.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        if pid <= 1:
            raise OSError("not a process of this box")
        return Head(pid, backup)
    except (OSError, struct.error):
        backup.close()
        return None
