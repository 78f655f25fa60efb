"""Runners: each is started once and holds many boxes. `Runner` is the base of all kinds, `Process` the built-in one.

A user's own backend is a subclass of `Runner`, named in `sandbox.backend` as `module:object`; its `level` is the level
that it is as strong as.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.sandbox import launch as launching
from agentrl_cli.sandbox import owner
from agentrl_cli.sandbox.cgroup import Cgroup, set_limit
from agentrl_cli.sandbox.channel import START, BoxLost, Channel
from agentrl_cli.sandbox.launch import Launch

AT_ONCE = 4
"""Executions at once for each runner: some sleep, and the rest share the cores."""
PATIENCE = 30.0
"""Seconds without an answer to a ping after which a runner counts as stuck: on a busy machine they are slow."""
_BOX_OWN = 64
"""MiB for a box itself: its init, and the pages that its processes copy."""
_KEPT = 1024
"""Waiting processes of all boxes of a runner: inits, sessions, checkpoints."""


class Runner(ABC):
    """Holds boxes, and opens and drops them; how one is started and killed is each kind's own."""

    level: ClassVar[str] = ""
    """The level that a user's own backend equals in strength (a key of levels.STRENGTH)."""

    def __init__(self, launch: Launch, limits: LimitsConfig) -> None:
        self.launch, self.limits = launch, limits
        self.boxes: dict[int, Channel] = {}
        self.spares: list[Channel] = []
        """Boxes that wait for a session; they are also in `boxes`."""
        self._numbers = 0
        self._asked = 0.0

    @classmethod
    @abstractmethod
    async def start(cls, launch: Launch, number: int, limits: LimitsConfig) -> Self:
        """Starts a runner and waits until it is warm. Raises SandboxUnavailable: why, and the fix."""

    @abstractmethod
    async def connect(self, channel: Channel, limits: dict[str, Any]) -> None:
        """Starts a box that serves `channel`. Raises BoxLost."""

    @abstractmethod
    def kill(self, channel: Channel) -> None:
        """Ends one box that was lost."""

    @abstractmethod
    def condemn(self) -> None:
        """Kills a stuck runner, which is not `alive` any more; its sessions are rebuilt on others."""

    @property
    def bounded(self) -> bool:
        """Whether the kernel, and not only the supervisor, bounds the number of processes in a box."""
        return True

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can open boxes."""

    @abstractmethod
    def unavailable(self, what: str) -> SandboxUnavailable:
        """Return the error to raise if this kind does not work here."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the runner and everything in it; returns when it has ended."""

    @abstractmethod
    def ping(self) -> None:
        """Sends a ping; `pong` receives the answer."""

    def pong(self) -> None:
        """Notes that the runner answered a ping."""
        self._asked = 0.0

    def stuck(self) -> bool:
        """Whether the last ping has been unanswered for too long; sends the next one otherwise. Never waits."""
        if self._asked:
            return time.monotonic() - self._asked > PATIENCE
        self._asked = time.monotonic()
        self.ping()
        return False

    @property
    def full(self) -> bool:
        """Whether it has no room for another box."""
        return False

    @property
    def busy(self) -> int:
        """Number of boxes that sessions hold."""
        return len(self.boxes) - len(self.spares)

    async def open(self, limits: dict[str, Any]) -> Channel:
        """Return a new box. Raises BoxLost; ConfigError for limits beyond those of the runner."""
        self._numbers += 1
        channel = Channel(self._numbers)
        self.boxes[channel.number] = channel
        try:
            await self.connect(channel, limits)
            frame = await channel.answer(START)
            if not frame.header.get("ready"):
                raise BoxLost(
                    str(frame.header.get("status", "protocol_error")),
                    str(frame.header.get("detail", "")),
                )
        except BaseException:
            self.drop(channel)
            raise
        return channel

    def adopt(self, channel: Channel, limits: dict[str, Any]) -> None:
        """Gives a box that was opened in advance to a session with limits of its own. Raises BoxLost."""
        channel.ask({"op": "adopt", "limits": limits})

    def fits(self, limits: LimitsConfig) -> bool:
        """Whether boxes opened in advance suit these limits: the size of their file system is fixed."""
        return (limits.disk_mb, limits.inodes) == (self.limits.disk_mb, self.limits.inodes)

    def drop(self, channel: Channel) -> None:
        """Closes a box, and kills it if it was lost."""
        lost = channel.lost
        channel.close()
        if channel in self.spares:
            self.spares.remove(channel)
        if self.boxes.pop(channel.number, None) is None or lost is None:
            return
        if lost.silent:
            self.condemn()
        elif self.alive:
            self.kill(channel)

    def _drop_all(self) -> None:
        for channel in list(self.boxes.values()):
            channel.close()
        self.boxes.clear()
        self.spares.clear()


class Process(Runner):
    """A runner that is a process of this machine: levels ns, landlock and bare."""

    def __init__(
        self, launch: Launch, limits: LimitsConfig, process: subprocess.Popen[bytes], control: socket.socket,
        err: IO[bytes], folder: Path, group: Cgroup | None,
    ) -> None:  # fmt: skip
        super().__init__(launch, limits)
        self.process, self.control, self.err, self.folder, self.group = (
            process,
            control,
            err,
            folder,
            group,
        )
        self._groups: dict[int, Path] = {}
        self._largest = _add_box_memory(limits.model_dump())
        self._sick = False
        self._last_stderr = ""

    @classmethod
    async def start(cls, launch: Launch, number: int, limits: LimitsConfig) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tasks = 0 if launch.level == "ns" else _KEPT + AT_ONCE * limits.processes
        group = (
            Cgroup.make(bound_runner_memory(_add_box_memory(limits.model_dump())), tasks)
            if launch.level != "bare"
            else None
        )
        folder = owner.new_folder("work")
        try:
            process, err = launching.start(launch, theirs.fileno(), number, folder, group)
        except BaseException as error:
            ours.close()
            if group:
                group.remove()
            if not isinstance(error, OSError):
                raise
            raise SandboxUnavailable(
                f"Sandbox level {launch.level} does not start: {error.strerror}: {error.filename}.",
                hint=launching.explain(launch.level, str(error)),
            ) from None
        finally:
            theirs.close()
        ours.setblocking(False)
        runner = cls(launch, limits, process, ours, err, folder, group)
        try:
            answer = await asyncio.wait_for(
                asyncio.get_running_loop().sock_recv(ours, 65536), START
            )
        except (TimeoutError, ConnectionError):
            answer = b""
        except BaseException:
            await runner.close()
            raise
        if not answer or not json.loads(answer).get("ready"):
            await runner.close()
            raise runner.unavailable("it did not come up")
        return runner

    @property
    def bounded(self) -> bool:
        held = self.group is not None and self.group.bounded
        return self.launch.level == "ns" or held or launching.nproc_holds()

    def unavailable(self, what: str) -> SandboxUnavailable:
        wrote = self.stderr
        return SandboxUnavailable(
            f"Sandbox level {self.launch.level} does not work here: {wrote.splitlines()[-1] if wrote else what}.",
            hint=launching.explain(self.launch.level, wrote + what),
        )

    @property
    def stderr(self) -> str:
        """The end of the runner's stderr."""
        if self.err.closed:
            return self._last_stderr
        self.err.seek(0, 2)
        self.err.seek(max(0, self.err.tell() - 4096))
        return self.err.read().decode("utf-8", "replace").strip()

    @property
    def alive(self) -> bool:
        return not self._sick and self.process.poll() is None

    def condemn(self) -> None:
        self._sick = True
        self.process.kill()

    def ping(self) -> None:
        self._send({"op": "ping"})

    def stuck(self) -> bool:
        try:
            if self.control.recv(4096):
                self.pong()
        except BlockingIOError:
            pass  # no answer yet
        except OSError:
            return True
        return super().stuck()

    def _send(self, request: dict[str, Any], fds: list[int] | None = None) -> None:
        """Sends a request to the runner itself; with a full queue it is stuck and is ended. Raises BoxLost."""
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], fds or [])
        except OSError as error:  # also BlockingIOError
            self.condemn()
            raise BoxLost("sandbox_restarted", f"the runner does not answer: {error}") from None

    async def connect(self, channel: Channel, limits: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        folder = self._group_for(limits)
        if folder:
            self._groups[channel.number] = folder
        try:
            with Cgroup.files(folder) as files:
                self._send(
                    {"op": "open", "id": channel.number, "limits": limits},
                    [theirs.fileno(), *files],
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)

    def _group_for(self, limits: dict[str, Any]) -> Path | None:
        """Return a cgroup for a box.

        If a pack asks for more than the runner has in all, the runner's limit is raised.
        """
        if self.group is None:
            return None
        if _add_box_memory(limits) > self._largest:
            self._largest = _add_box_memory(limits)
            _limit(self.group.folder, bound_runner_memory(self._largest))
        return self.group.take(_add_box_memory(limits))

    def adopt(self, channel: Channel, limits: dict[str, Any]) -> None:
        folder = self._groups.get(channel.number)
        if folder and _add_box_memory(limits) != _add_box_memory(self.limits.model_dump()):
            _limit(folder, _add_box_memory(limits))
        super().adopt(channel, limits)

    def fits(self, limits: LimitsConfig) -> bool:
        return super().fits(limits) and _add_box_memory(limits.model_dump()) <= self._largest

    def drop(self, channel: Channel) -> None:
        super().drop(channel)
        folder = self._groups.pop(channel.number, None)
        if folder and self.group:
            self.group.give(folder)

    def kill(self, channel: Channel) -> None:
        try:
            self._send({"op": "kill", "id": channel.number})
        except BoxLost:
            return  # the runner was ended over that

    async def close(self) -> None:
        self._drop_all()
        self.control.close()
        end = time.monotonic() + 2.0
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.process.kill()
                end += 2.0
            await asyncio.sleep(0.002)
        self._last_stderr = self.stderr
        self.err.close()
        if self.group:
            self.group.remove()
        await asyncio.to_thread(owner.clear, self.folder)  # a killed runner could not delete it


def _limit(folder: Path, limit: int) -> None:
    try:
        set_limit(folder, limit)
    except OSError as error:
        raise BoxLost("host_resources", f"the memory limit of a box: {error}") from None


def _add_box_memory(limits: dict[str, Any]) -> int:
    """Return the bytes of one box's cgroup: files are memory too, and so are those of earlier states."""
    return (int(limits["memory_mb"]) + 3 * int(limits["disk_mb"]) + _BOX_OWN) << 20


def bound_runner_memory(own: int) -> int:
    """Return the bytes of all boxes of a runner: as many as run at once, but at most 0.8 of the machine's memory."""
    wanted = AT_ONCE * own + (512 << 20)
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return wanted
    return min(wanted, int(0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
