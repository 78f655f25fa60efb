"""Limits on time: what others take of the machine does not count, and what hangs ends."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.hooks.threads import TICK, OwnTime, slowness
from agentrl_cli.registry.plugins import processors

LIMIT = 0.05


class Machine:
    """How slow a machine is at each look, and an event at a certain look."""

    def __init__(self, slow: Callable[[int], float], until: int = 0) -> None:
        self.slow, self.until, self.looks = slow, until, 0
        self.reached = asyncio.Event()

    def __call__(self) -> float:
        self.looks += 1
        if self.looks == self.until:
            self.reached.set()
        return self.slow(self.looks)


async def test_what_is_slow_because_everything_is_does_not_end() -> None:
    """The body goes on until its limit was looked at ten times; on a machine of its own it ends at the first look."""
    busy = Machine(lambda _: 20.0, until=10)
    async with OwnTime(LIMIT, busy) as limit:
        await busy.reached.wait()
    assert not limit.expired() and limit.had < LIMIT
    free = Machine(lambda _: 1.0, until=10)
    with pytest.raises(TimeoutError):
        async with OwnTime(LIMIT, free) as limit:
            await free.reached.wait()
    assert limit.expired() and free.looks < 10


async def test_what_hangs_ends_however_busy_the_machine_is() -> None:
    with pytest.raises(TimeoutError):
        async with OwnTime(0.001, lambda: 1e9) as limit:
            await asyncio.Event().wait()
    assert limit.expired()


async def test_the_clock_stands_while_something_else_limits_what_is_waited_for() -> None:
    with pytest.raises(TimeoutError):
        async with OwnTime(LIMIT, Machine(lambda _: 1.0)) as limit:
            with limit.pause(), limit.pause():
                await asyncio.sleep(4 * LIMIT)
            paused = limit.had
            await asyncio.sleep(40 * LIMIT)
    assert paused < LIMIT and limit.expired()


async def test_a_pause_after_the_limit_starts_no_other_look() -> None:
    """What the body waits for while it ends may be limited by something else, too."""
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    with pytest.raises(TimeoutError):
        async with OwnTime(LIMIT, lambda: 1.0) as limit:
            try:
                await asyncio.Event().wait()
            finally:
                with limit.pause():
                    await asyncio.sleep(0)
                await asyncio.sleep(LIMIT)
    assert limit.expired() and not failed


async def test_a_loop_that_is_blocked_gives_no_time() -> None:
    """Nothing could run meanwhile: of a look that comes late, only what was planned counts."""
    async with OwnTime(3 * TICK, lambda: 1.0) as limit:
        time.sleep(4 * TICK)
        for _ in range(3):
            await asyncio.sleep(0)
    assert 0 < limit.had <= TICK and not limit.expired()


async def test_an_error_of_the_body_and_no_limit() -> None:
    with pytest.raises(KeyError):
        async with OwnTime(LIMIT):
            raise KeyError("its own")
    async with OwnTime(None) as limit:
        await asyncio.sleep(0)
    assert limit.seconds is None and not limit.expired()
    assert slowness() >= 1.0


def test_a_process_that_may_use_one_processor_is_slowed_by_what_wants_it() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert processors() == len(allowed)
