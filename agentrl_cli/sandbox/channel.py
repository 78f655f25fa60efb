"""The host's end of a runner and of its boxes: processes, sockets, backstops. No thread, no shell, no shared state."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import subprocess
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from agentrl_cli.errors import SandboxUnavailable, UsageError
from agentrl_cli.paths import sandbox_dir
from agentrl_cli.sandbox import launch as launching
from agentrl_cli.sandbox.cgroup import Cgroup
from agentrl_cli.sandbox.launch import Launch
from agentrl_cli.sandbox.results import Limits

GRACE = 5.0
"""Seconds beyond the wall limit after which the host gives a box up."""
AT_ONCE = 4
"""Executions at once for each runner: some sleep, and the rest share the cores."""
START = 20.0
"""Seconds a runner may take to come up on a busy machine."""


@cache
def inside(name: str) -> ModuleType:
    """A module of the folder `sandbox/`, loaded by path: wire format and plain values are the same on both sides."""
    path = Path(sandbox_dir()) / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"agentrl_inside_{name}", path)
    if spec is None or spec.loader is None:
        raise SandboxUnavailable(f"{path} cannot be loaded.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BoxLost(Exception):
    """A box, or its runner, went away or broke the protocol: our fault."""

    def __init__(self, status: str, detail: str, *, silent: bool = False) -> None:
        super().__init__(detail)
        self.status, self.detail, self.silent = status, detail, silent
        """`silent`: it did not answer in time, so that its runner may be stuck as a whole."""


class Channel(asyncio.Protocol):
    """The host's end of one box: one request at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._wire = inside("wire")
        self._reader = self._wire.Reader()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._early: list[Any] = []
        self.lost: BoxLost | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except self._wire.Broken as error:
            self._lose(BoxLost("protocol_error", str(error)))
            return
        for frame in frames:
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(frame)
            else:
                self._early.append(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(BoxLost("sandbox_restarted", f"the box went away{f': {exc}' if exc else ''}"))

    def _lose(self, reason: BoxLost) -> None:
        self.lost = self.lost or reason
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self.lost)
        self.close()

    async def answer(self, timeout: float) -> Any:
        """The next frame. Raises BoxLost after `timeout` seconds, or where the box is gone."""
        if self._early:
            return self._early.pop(0)
        if self.lost:
            raise self.lost
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._waiting, timeout)
        except TimeoutError:
            self.lost = BoxLost("sandbox_restarted", f"no answer within {timeout:g} s", silent=True)
            raise self.lost from None
        finally:
            self._waiting = None

    def ask(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Sends one request; raises BoxLost where the box is gone."""
        if self.lost or self._transport is None:
            raise self.lost or BoxLost("sandbox_restarted", "the box is closed")
        if len(body) > self._wire.MAX_BODY:
            raise UsageError(f"{len(body) >> 20} MiB are more than one request to a sandbox may hold.")
        self._transport.write(self._wire.pack(header, body))

    def close(self) -> None:
        """Ends the box: it exits when its socket closes."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self.lost = self.lost or BoxLost("sandbox_restarted", "the box is closed")


class Runner:
    """One running jail and the boxes in it."""

    def __init__(
        self,
        launch: Launch,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        err: IO[bytes],
        group: Cgroup | None = None,
    ) -> None:
        self.launch, self.process, self.control, self.err, self.group = launch, process, control, err, group
        self.boxes: dict[int, Channel] = {}
        self._numbers = 0

    @classmethod
    async def start(cls, launch: Launch, number: int, limits: Limits) -> Runner:
        """Starts a runner and waits until it is warm. Raises SandboxUnavailable: what it wrote, and the fix."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        group = Cgroup.make(number, (AT_ONCE * limits.memory_mb + 512) << 20) if launch.level != "bare" else None
        try:
            process, err = launching.start(launch, theirs.fileno(), number, group)
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
        runner = cls(launch, process, ours, err, group)
        try:
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 65536), START)
        except (TimeoutError, ConnectionError):
            answer = b""
        except BaseException:
            await runner.close()
            raise
        if not answer or not json.loads(answer).get("ready"):
            await runner.close()
            raise runner.unavailable("it did not come up")
        return runner

    def unavailable(self, what: str) -> SandboxUnavailable:
        """The error to raise where this level does not work."""
        wrote = self.stderr
        return SandboxUnavailable(
            f"Sandbox level {self.launch.level} does not work here: {wrote.splitlines()[-1] if wrote else what}.",
            hint=launching.explain(self.launch.level, wrote + what),
        )

    @property
    def stderr(self) -> str:
        """The end of what the runner wrote to stderr."""
        if self.err.closed:
            return self._last_words
        self.err.seek(0, 2)
        self.err.seek(max(0, self.err.tell() - 4096))
        return self.err.read().decode("utf-8", "replace").strip()

    _last_words = ""

    @property
    def alive(self) -> bool:
        return not self.sick and self.process.poll() is None

    sick = False
    """Whether it stopped answering: the pool gives it no more boxes and takes it away."""

    def condemn(self) -> None:
        """Kills a runner that is stuck; the sessions in it are rebuilt on others."""
        self.sick = True
        self.process.kill()

    full = False
    """Whether another box has to go elsewhere: here never."""

    async def open(self, limits: dict[str, Any]) -> Channel:
        """A new box. Raises BoxLost."""
        self._numbers += 1
        ours, theirs = socket.socketpair()
        request = json.dumps({"op": "open", "id": self._numbers, "limits": limits}).encode()
        try:
            socket.send_fds(self.control, [request], [theirs.fileno()])
        except OSError as error:  # BlockingIOError too: a runner with a full queue is stuck
            ours.close()
            self.condemn()
            raise BoxLost("sandbox_restarted", f"the runner does not answer: {error}") from None
        finally:
            theirs.close()
        channel = Channel(self._numbers)
        self.boxes[channel.number] = channel
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
        try:
            frame = await channel.answer(START)
            if not frame.header.get("ready"):
                raise BoxLost(str(frame.header.get("status", "protocol_error")), str(frame.header.get("detail", "")))
        except BaseException:
            self.drop(channel)
            raise
        return channel

    def drop(self, channel: Channel) -> None:
        """Closes a box, and kills it where it was lost."""
        stuck = channel.lost is not None
        silent = channel.lost is not None and channel.lost.silent
        channel.close()
        if self.boxes.pop(channel.number, None) is None:
            return
        if silent:
            self.condemn()
        elif stuck and self.alive:
            try:
                self.control.send(json.dumps({"op": "kill", "id": channel.number}).encode())
            except OSError:
                self.process.kill()

    async def close(self) -> None:
        """Ends the runner and everything in it; returns when its process is gone."""
        for channel in list(self.boxes.values()):
            channel.close()
        self.boxes.clear()
        self.control.close()
        end = time.monotonic() + 2.0
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.process.kill()
                end += 2.0
            await asyncio.sleep(0.002)
        self._last_words = self.stderr
        self.err.close()
        if self.group:
            self.group.remove()
