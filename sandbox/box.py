"""The state that the parts of one box share: its processes, files, limits, and the count of out-of-memory kills."""

from __future__ import annotations

import _socket as socket
import signal
import time
from typing import Any

from sandbox import memory
from sandbox.checkpoints import Checkpoints, SessionProcess
from sandbox.execution import Capture
from sandbox.filesystem import snapshot
from sandbox.isolation import rlimits
from sandbox.processes import ProcessTree

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
        kills: memory.OutOfMemoryKills | None = None,
    ) -> None:
        self.host, self.limits, self.base, self.level, self.rules = host, limits, base, level, rules
        self.user = user
        """Who runs the code, if that is another user than this process (level `uid`)."""
        self.others = 0 if level in ("ns", "uid") else rlimits.count_threads()
        self.tree = ProcessTree(level, user)
        self.kills = kills or memory.OutOfMemoryKills([])
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
