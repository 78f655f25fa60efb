"""The host's end of one box: frames, answers, timeouts. No thread, no shell, no shared state."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl_cli.errors import SandboxUnavailable, UsageError
from agentrl_cli.paths import sandbox_dir

GRACE = 10.0
"""Seconds beyond the wall limit after which the host gives up a box; on a busy machine its answer is late."""
START = 600.0
"""Seconds that a runner may take to come up. One that ends is noticed at once."""


@cache
def guest_module(name: str) -> ModuleType:
    """Return a module of the guest, such as `protocol/framing`, loaded by path: both sides use the same format."""
    path = Path(sandbox_dir()) / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"agentrl_guest_{name.replace('/', '_')}", path)
    if spec is None or spec.loader is None:
        raise SandboxUnavailable(f"{path} cannot be loaded.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BoxLost(Exception):
    """A box or its runner ended or broke the protocol: an infrastructure error."""

    def __init__(self, status: str, detail: str, *, silent: bool = False) -> None:
        super().__init__(detail)
        self.status, self.detail, self.silent = status, detail, silent
        """`silent`: it did not answer in time, so its runner may be stuck as a whole."""


class Channel(asyncio.Protocol):
    """The host's end of one box: one request at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._framing = guest_module("protocol/framing")
        self._reader = self._framing.Reader()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._early: list[Any] = []
        self._alarm: asyncio.TimerHandle | None = None
        self.lost: BoxLost | None = None
        self.heard = 0.0
        """When it last answered, by the monotonic clock."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except self._framing.Broken as error:
            self._lose(BoxLost("protocol_error", str(error)))
            return
        self.heard = time.monotonic()
        for frame in frames:
            if "more" in frame.header:
                self._wait_longer(float(frame.header["more"]))
            elif self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(frame)
            else:
                self._early.append(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(BoxLost("sandbox_restarted", f"the box ended{f': {exc}' if exc else ''}"))

    def _lose(self, reason: BoxLost) -> None:
        self.lost = self.lost or reason
        self.close()

    async def answer(self, timeout: float) -> Any:
        """Return the next frame. Raises BoxLost after `timeout` seconds, or if the box has ended."""
        if self._early:
            return self._early.pop(0)
        if self.lost:
            raise self.lost
        self._timeout = timeout
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        self._alarm = loop.call_later(timeout, self._late)
        try:
            return await self._waiting
        finally:
            self._alarm.cancel()
            self._waiting = None

    def _wait_longer(self, seconds: float) -> None:
        """Moves the deadline as the box has moved its own: others had the processors."""
        if self._alarm is not None and self._waiting is not None:
            self._alarm.cancel()
            self._timeout += seconds
            self._alarm = asyncio.get_running_loop().call_at(
                self._alarm.when() + seconds, self._late
            )

    def _late(self) -> None:
        if self._waiting is None or self._waiting.done():
            return  # the answer arrived while the event loop was busy
        self.lost = self.lost or BoxLost(
            "sandbox_restarted", f"no answer within {self._timeout:g} s", silent=True
        )
        self._waiting.set_exception(self.lost)

    def ask(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Sends one request; raises BoxLost if the box has ended."""
        if self.lost or self._transport is None:
            raise self.lost or BoxLost("sandbox_restarted", "the box is closed")
        if len(body) > self._framing.MAX_BODY:
            raise UsageError(
                f"{len(body) >> 20} MiB are more than one request to a sandbox may hold."
            )
        self._transport.write(self._framing.pack(header, body))

    def close(self) -> None:
        """Ends the box: it exits when its socket closes."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self.lost = self.lost or BoxLost("sandbox_restarted", "the box is closed")
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self.lost)
