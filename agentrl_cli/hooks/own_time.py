"""Time limits that count only the seconds that the machine gave: a slow machine decides nothing about an episode.

A limit on wall-clock time falls on whatever is slow while other programs have the processors, and in a training those
are the long, failing episodes. Here a second counts as its share: with eight programs that want to run on two
processors, as a quarter. Nor does time count in which this process itself was kept from running.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

TICK = 0.25
"""Seconds after which a limit looks at the clock again."""
MOST = 100.0
"""A limit lasts at most so many times its seconds, however busy the machine is: what hangs ends."""


def slowness() -> float:
    """Return how many times as long as alone a program takes now: those that want to run, by processors; at least 1."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            wanting = float(file.read().split()[3].partition("/")[0])
    except OSError:  # no Linux: the average of the last minute
        wanting = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1.0, wanting / (os.cpu_count() or 1))


class OwnTime:
    """`async with OwnTime(5.0) as limit:` ends its body as `asyncio.timeout` does, by the seconds it was given.

    `slowness`: how many times as long as alone everything takes at the moment. Without `seconds` there is no limit.
    """

    def __init__(self, seconds: float | None, slowness: Callable[[], float] = slowness) -> None:
        self.seconds = seconds
        self.had = 0.0
        """Seconds that the body had so far."""
        self._slowness = slowness
        self._timeout = asyncio.timeout(None)
        self._paused = 0
        self._looked = self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> OwnTime:
        await self._timeout.__aenter__()
        if self.seconds is not None:
            self._looked = asyncio.get_running_loop().time()
            self._wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        await self._timeout.__aexit__(kind, error, trace)  # raises TimeoutError

    def expired(self) -> bool:
        """Whether the body was ended by this limit."""
        return self._timeout.expired()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop counting inside the block, where something else limits the waiting. Nests."""
        self._count()
        self._paused += 1
        try:
            yield
        finally:
            self._count()
            self._paused -= 1

    def _count(self) -> None:
        """Add the time since the last look, without its excess over the plan: then this process could not run."""
        now = asyncio.get_running_loop().time()
        if not self._paused:
            self.had += max(0.0, min(now, self._due) - self._looked) / min(self._slowness(), MOST)
        self._looked = now

    def _wait(self) -> None:
        assert self.seconds is not None
        self._due = self._looked + max(0.001, min(TICK, self.seconds - self.had))
        self._handle = asyncio.get_running_loop().call_at(self._due, self._look)

    def _look(self) -> None:
        self._count()
        if self.seconds is not None and self.had >= self.seconds:
            self._timeout.reschedule(self._looked)
        else:
            self._wait()
