"""The process that holds a session's variables, and checkpoints: forks of it from before earlier requests.

`Box` is the state that the parts of one box share: its processes, files, limits, and the count of out-of-memory kills.
"""

from __future__ import annotations

import _socket as socket
import os
import select
import signal
import struct
import time
from contextlib import suppress
from typing import Any, NamedTuple

from sandbox import processes
from sandbox.execution import FRAME, Capture
from sandbox.filesystem import snapshot
from sandbox.isolation import privileges
from sandbox.processes import ProcessTree, signal_process
from sandbox.protocol import framing

_CREDENTIALS = struct.Struct("3i")


class SessionProcess:
    """The process that holds a session's variables, or held them before an earlier request.

    It is stopped between requests: threads of a cell and handlers of a timer's signal would continue.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self.pidfd = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        end = select.poll()
        end.register(self.pidfd, select.POLLIN)
        return bool(end.poll(0))

    def answers(self) -> bool:
        """Whether a checkpoint still works: the code may have killed it, and it may still be ending."""
        signal_process(self.pid, signal.SIGCONT)
        try:
            until = time.monotonic() + FRAME
            framing.send(self.control, {"op": "ping", "nonce": ""}, until=until)
            return framing.receive(self.control, until, framing.MAX_ANSWER) is not None
        except (OSError, framing.Broken):
            return False
        finally:
            signal_process(self.pid, signal.SIGSTOP)

    def close(self) -> None:
        """Closes the descriptors; the process itself is ended elsewhere."""
        os.close(self.pidfd)
        self.control.close()


class Checkpoint(NamedTuple):
    """The state before one request of the host."""

    files: snapshot.Snapshot | None
    process: SessionProcess | None
    """None if the request changed no variables: they are those of the next checkpoint, or the current ones."""
    cells: int


class Checkpoints:
    """Checkpoints by the host's number of the request that followed. `limit`: bytes of files together.

    Pids of the processes it kills are added to `ended`, since they may take a moment to end.
    """

    def __init__(self, limit: int, ended: set[int]) -> None:
        self.limit, self.ended = limit, ended
        self.most = 0
        """How many are wanted. A session process gets its limit of processes at its start, so it includes them all."""
        self._states: dict[int, Checkpoint] = {}

    def __len__(self) -> int:
        return len(self._states)

    def pids(self) -> set[int]:
        """Return the processes of all checkpoints."""
        return {state.process.pid for state in self._states.values() if state.process}

    def add(
        self,
        header: dict[str, Any],
        files: snapshot.Snapshot | None,
        process: SessionProcess | None,
        cells: int,
    ) -> None:
        """Keeps the state before a request, at most `keep` of them; the oldest are dropped first."""
        self._states[header["call"]] = Checkpoint(files, process, cells)
        while len(self) > header["keep"] or (
            len(self) > 1
            and snapshot.add_sizes([state.files for state in self._states.values()]) > self.limit
        ):
            self._drop(min(self._states))

    def add_running(
        self,
        backup: socket.socket,
        header: dict[str, Any],
        files: snapshot.Snapshot | None,
        cells: int,
    ) -> None:
        """Keeps the state of the checkpoint at the other end of `backup`."""
        if process := adopt(backup):
            signal_process(process.pid, signal.SIGSTOP)
            self.add(header, files, process, cells)
        else:
            self.clear()  # earlier states cannot be reached past this request

    def take(self, number: int) -> Checkpoint | None:
        """Removes and returns the state before a request, with the process that holds it; drops the later ones.

        Its process is None if the current session process holds the state.
        """
        wanted = self._states.get(number)
        if wanted is None:
            return None
        later = sorted(other for other in self._states if other >= number)
        holder = next((other for other in later if self._states[other].process), None)
        process = self._states.pop(holder).process if holder is not None else None
        for other in later:
            if other != holder:
                self._drop(other)
        return wanted._replace(process=process)

    def clear(self) -> None:
        """Drops all."""
        for number in list(self._states):
            self._drop(number)

    def _drop(self, number: int) -> None:
        process = self._states.pop(number).process
        if process:
            signal_process(process.pid, signal.SIGKILL)
            self.ended.add(process.pid)
            process.close()


def adopt(backup: socket.socket) -> SessionProcess | None:
    """Wakes the checkpoint at the other end; the kernel reports which process greets. None if it does not answer."""
    try:
        backup.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with suppress(BlockingIOError):  # discard what the code wrote to it
            backup.recv(1 << 20, socket.MSG_DONTWAIT)
        backup.send(b"\0")  # wakes it
        framing.wait(backup, select.POLLIN, time.monotonic() + FRAME)
        # One read: more would take more time than the host waits.
        data, ancillary, _, _ = backup.recvmsg(
            framing.PREFIX.size + 64, socket.CMSG_SPACE(_CREDENTIALS.size)
        )
        if len(data) < framing.PREFIX.size or not ancillary:
            raise OSError("the checkpoint has ended")
        head_size, body_size = framing.PREFIX.unpack_from(data)
        if body_size or len(data) != framing.PREFIX.size + head_size:
            raise OSError("the checkpoint sent something other than its greeting")
        pid = _CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[0]
        backup.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        if pid <= 1:
            raise OSError("not a process of this box")
        return SessionProcess(pid, backup)
    except (OSError, struct.error):
        backup.close()
        return None


Answer = tuple[dict[str, Any], bytes]
"""Header and body."""


class Box:
    """One session's box. `base`: address space of the empty interpreter, in bytes; `rules`: Landlock's descriptor."""

    def __init__(
        self,
        host: socket.socket,
        limits: dict[str, Any],
        base: int,
        level: str,
        rules: int | None = None,
        user: tuple[int, int] | None = None,
        kills: processes.OutOfMemoryKills | None = None,
    ) -> None:
        self.host, self.limits, self.base, self.level, self.rules = host, limits, base, level, rules
        self.user = user
        """Who runs the code, if that is another user than this process (level `uid`)."""
        self.others = 0 if level in ("ns", "uid") else privileges.count_threads()
        self.tree = ProcessTree(level, user)
        self.kills = kills or processes.OutOfMemoryKills([])
        self.files = snapshot.Files(limits["disk_mb"] << 20, limits["inodes"], user)
        self.checkpoints = Checkpoints(self.files.limit, self.tree.ended)
        self.process: SessionProcess | None = None
        """What holds the session's variables; None before its first cell."""
        self.cells = 0

    def limits_of(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the limits of one request."""
        return {**self.limits, **header.get("limits", {})}

    def list_protected(self) -> set[int]:
        """Return the processes that outlive an execution."""
        pids = self.checkpoints.pids()
        return pids | {self.process.pid} if self.process else pids

    def stop_protected(self) -> None:
        """Stops the processes that outlive an execution; its code may have resumed them."""
        for pid in self.checkpoints.pids():
            signal_process(pid, signal.SIGSTOP)
        if self.process:
            processes.stop(self.process.pid)

    def own_processes(self) -> int:
        """Processes that count against the limit of an execution and are not its own."""
        return self.others + 2 + len(self.checkpoints) + (2 if self.process else 0)

    def captures(self, out: int, err: int, limits: dict[str, Any]) -> tuple[Capture, Capture]:
        """Captures of stdout and stderr."""
        return Capture(out, limits["output_kb"] << 10), Capture(err, limits["output_kb"] << 10)

    def over_memory(self, reason: str, status: int, peak: int, limits: dict[str, Any]) -> bool:
        """Whether the ended process and the running ones held more than the limit; asked if no cgroup reports it.

        `peak`: KiB of the ended process.
        """
        if self.kills.exact or reason != "exited" or status == 0:
            return False
        left = (limits["memory_mb"] << 20) - (peak << 10)
        return self.tree.exceeds(left, self.tree.pids(), time.monotonic() + 1.0)

    def attribute_kill(self, reply: dict[str, Any], over: bool) -> dict[str, Any]:
        """Return the result after out-of-memory kills: the code's own fault, or the host's if another's memory ran out.

        `over`: whether the box held more than its limit, as far as that is known.
        """
        if reply["status"] == "timeout":
            return reply
        killed = signal.SIGKILL in (reply.get("signal"), reply.get("exit", 0) - 128)
        whose = self.kills.since(over, killed)
        if whose == "others":
            return {
                **reply,
                "status": "host_resources",
                "detail": "memory ran out outside of this box",
            }
        if whose == "own" and reply["status"] not in ("ok", "state_lost"):
            return {**reply, "status": "memory", "detail": "processes together"}
        return reply
