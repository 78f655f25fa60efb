"""The warm runners of one sandbox: started when needed, with spare boxes, replaced when they are dead or stuck."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.errors import AgentRLError, SandboxUnavailable
from agentrl_cli.sandbox.channel import BoxLost, Channel
from agentrl_cli.sandbox.launch import Launch
from agentrl_cli.sandbox.runner_process import Runner

GRADING = "@grading"
"""Stands in a profile beside the names of packages: its runners hold boxes for grading alone."""
SPARES = 4
"""Boxes that every runner keeps ready for later sessions: a box takes longer to start than most programs run."""
HEALTH = 5.0
"""Seconds between two health checks of idle runners."""
_FRESH = 2.0
"""Seconds for which a spare box counts as healthy after an answer; later it is asked first."""


class RunnerPool:
    """Runners of one level by profile: the packages they have, and whether they only grade."""

    def __init__(self, level: str, limits: LimitsConfig, workers: int, kind: type[Runner]) -> None:
        self.level, self.limits, self.workers, self.kind = level, limits, workers, kind
        self.runners: dict[tuple[str, ...], list[Runner]] = {}
        self._starting = asyncio.Lock()
        self._started = 0
        self._closed = False
        self._tasks: dict[tuple[str, ...] | None, asyncio.Task[None]] = {}
        """Background tasks: for a profile, starting runners and spare boxes; for None, the health checks."""

    def start_health_checks(self) -> None:
        """Inspects the runners every few seconds from now on."""
        self._tasks[None] = asyncio.create_task(self._check_health())

    async def box(
        self, limits: LimitsConfig, seed: int | None, profile: tuple[str, ...]
    ) -> tuple[Runner, Channel]:
        """Return a box on the least busy runner, a spare one if possible.

        Raises BoxLost, or SandboxUnavailable if none starts.
        """
        runner = await self.runner(profile)
        own = {**limits.model_dump(), "seed": seed}
        try:
            while runner.fits(limits) and runner.spares:
                channel = runner.spares.pop()
                try:
                    if await _is_healthy(channel):
                        runner.adopt(channel, own)
                        return runner, channel
                except BaseException:  # a cancellation, too: no session has it yet
                    runner.drop(channel)
                    raise
                runner.drop(channel)
                if not runner.busy:  # it may be stuck as a whole, and no session is lost with it
                    await self._replace(runner)
                    runner = await self.runner(profile)
            return runner, await runner.open(own)
        except BoxLost:
            if not runner.busy:
                await self._replace(runner)
            raise
        finally:
            self._prepare(profile)

    async def runner(self, profile: tuple[str, ...]) -> Runner:
        """Return the least busy live runner of a profile; a new one if none has room."""
        if self._closed:
            raise SandboxUnavailable("The sandbox is closed.")
        # One at a time, so that sessions that come together do not each start a runner; `_stock` takes the same lock.
        async with self._starting:
            runners = self.runners.setdefault(profile, [])
            for dead in [runner for runner in runners if not runner.alive]:
                runners.remove(dead)
                await dead.close()
            if all(runner.full for runner in runners):
                await self._start(profile)
            return min(runners, key=lambda runner: (runner.full, runner.busy, -len(runner.spares)))

    async def _start(self, profile: tuple[str, ...]) -> None:
        self._started += 1
        imports = tuple(name for name in profile if name != GRADING)
        launch = Launch(self.level, imports, grading=GRADING in profile)
        self.runners[profile].append(await self.kind.start(launch, self._started, self.limits))

    def _prepare(self, profile: tuple[str, ...]) -> None:
        """Starts more boxes in the background after one was taken, and more runners if all are busy."""
        running = self._tasks.get(profile)
        if not self._closed and (running is None or running.done()):
            self._tasks[profile] = asyncio.create_task(self._stock(profile))

    async def _stock(self, profile: tuple[str, ...]) -> None:
        """Starts missing runners and spare boxes. A failure recurs, and is reported, when the box is needed."""
        with suppress(BoxLost, AgentRLError, OSError):
            async with self._starting:
                runners = self.runners[profile]
                while len(runners) < self.workers and all(runner.busy for runner in runners):
                    await self._start(profile)
            while short := [
                r for r in runners if r.alive and not r.full and len(r.spares) < SPARES
            ]:
                runner = min(short, key=lambda runner: len(runner.spares))
                runner.spares.insert(0, await runner.open(self.limits.model_dump()))

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH)
            await self.inspect()

    async def inspect(self) -> None:
        """Replaces runners that are dead or stuck, and missing spare boxes."""
        for profile, runners in list(self.runners.items()):
            for runner in list(runners):
                if not _is_alive(runner):
                    await self._replace(runner)
            if not runners or any(len(runner.spares) < SPARES for runner in runners):
                self._prepare(profile)

    async def _replace(self, runner: Runner) -> None:
        for runners in self.runners.values():
            if runner in runners:
                runners.remove(runner)
        await runner.close()

    async def stop_tasks(self) -> None:
        """Starts no more runners, and cancels the background tasks."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Ends every runner; returns when their processes have ended."""
        await self.stop_tasks()
        runners = [runner for found in self.runners.values() for runner in found]
        self.runners.clear()
        await asyncio.gather(*(runner.close() for runner in runners))


def _is_alive(runner: Runner) -> bool:
    try:
        return runner.alive and not runner.stuck()
    except BoxLost:
        return False


async def _is_healthy(channel: Channel) -> bool:
    """Whether a spare box answers; one that answered a moment ago is not asked again."""
    if channel.lost is None and time.monotonic() - channel.heard < _FRESH:
        return True
    try:
        channel.ask({"op": "ping"})
        await channel.answer(_FRESH)
    except BoxLost as lost:
        channel.lost = BoxLost(
            lost.status, lost.detail
        )  # without `silent`, which would end its runner
        return False
    return True
