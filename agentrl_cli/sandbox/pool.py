"""`Sandbox`: a pool of warm runners of one isolation level, sized to the machine, with back-pressure and health checks.

    sandbox = await Sandbox.open(config.sandbox)
    session = await sandbox.session()
    result = await session.cell("x = 6 * 7\\nx")
    await sandbox.close()

A level below the configured minimum is an error, never a fallback. A session costs nothing until its first execution.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, fields
from types import TracebackType
from typing import Any

from agentrl_cli.errors import ConfigError, SandboxUnavailable
from agentrl_cli.registry import resolve
from agentrl_cli.sandbox.channel import AT_ONCE, BoxLost, Channel, Runner
from agentrl_cli.sandbox.launch import Launch
from agentrl_cli.sandbox.results import ExecResult, Limits
from agentrl_cli.sandbox.session import Session

STRENGTH = {"bare": 0, "landlock": 1, "ns": 2, "docker": 3}
"""Levels, weakest first. `ns` and `docker` hold hostile code; `landlock` holds most of it; `bare` holds nothing."""

AUTO = ("ns", "docker", "landlock")
"""What `backend: auto` tries, in this order: `ns` and `docker` hold the same, `ns` faster and without a daemon that is
root; `bare` is never chosen, only asked for."""

RUNNERS = {"docker": "agentrl_cli.sandbox.container:Container"}
"""Where a level's runner is, if it is not a process of our own."""


class Sandbox:
    """Where the model's code runs. Made by `open`; `level` says how strongly it is held."""

    def __init__(self, level: str, limits: Limits, workers: int) -> None:
        self.level = level
        self.limits = limits
        self.workers = workers
        self.counts: Counter[str] = Counter()
        """How many executions ended with each status, ours included."""
        self._runners: dict[tuple[str, ...], list[Runner]] = {}
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(workers * AT_ONCE)
        self._started = 0
        self._closed = False
        self._sessions: set[Session] = set()

    @classmethod
    async def open(cls, config: Any) -> Sandbox:
        """The strongest sandbox that `config` (a SandboxConfig) allows, with one runner warm.

        Raises SandboxUnavailable where only weaker isolation than `config.min_level` is to be had, saying why and
        how to get it; ConfigError where the two settings contradict each other.
        """
        minimum = STRENGTH[config.min_level]
        levels = AUTO if config.backend == "auto" else (config.backend,)
        if config.backend not in ("auto", *STRENGTH):
            raise ConfigError(
                f"Unknown sandbox backend {config.backend!r}.", hint=f"There are: auto, {', '.join(STRENGTH)}."
            )
        allowed = [level for level in levels if STRENGTH[level] >= minimum]
        if not allowed:
            raise SandboxUnavailable(
                f"sandbox.backend is {config.backend}, which is weaker than sandbox.min_level {config.min_level}.",
                hint=f"To accept that, set sandbox.min_level: {config.backend} too.",
            )
        limits = Limits(**{field.name: getattr(config, field.name) for field in fields(Limits)})
        workers = config.workers or min(8, os.cpu_count() or 1)
        problems: list[SandboxUnavailable] = []
        for level in allowed:
            sandbox = cls(level, limits, workers)
            try:
                await sandbox.check()
                return sandbox
            except SandboxUnavailable as problem:
                problems.append(problem)
                await sandbox.close()
        if len(problems) == 1:
            raise problems[0]
        raise SandboxUnavailable(
            f"No sandbox of level {config.min_level} or stronger works here. "
            + " ".join(problem.message for problem in problems),
            hint=" ".join(dict.fromkeys(problem.hint for problem in problems)),
        )

    async def check(self) -> None:
        """Runs one program in a fresh box. Raises SandboxUnavailable where that does not work."""
        runner = await self._runner(())
        try:
            channel = await runner.open(asdict(self.limits))
            channel.ask({"op": "run", "split": 16, "limits": {"wall": 10.0}}, b"print(6 * 7)    ")
            frame = await channel.answer(20.0)
        except BoxLost as lost:
            raise runner.unavailable(lost.detail) from None
        runner.drop(channel)
        if frame.body != b"42\n":
            raise runner.unavailable(f"a test program answered {frame.header} {frame.body[:200]!r}")

    async def session(
        self, *, keep: int = 0, seed: int | None = None, imports: tuple[str, ...] = (), **limits: Any
    ) -> Session:
        """A session for one episode; nothing is started before its first use.

        `keep`: how many earlier states stay alive so that `back` is immediate. `seed`: of `random` in the session.
        `imports`: packages besides the standard library (numpy…). The rest overrides single limits, e.g. `wall=2.0`.
        """
        unknown = limits.keys() - {field.name for field in fields(Limits)}
        if unknown:
            raise ConfigError(f"Unknown limit {min(unknown)!r}.", hint=f"There are: {', '.join(asdict(self.limits))}.")
        own = Limits(**{**asdict(self.limits), **limits})
        session = Session(self, own, keep=keep, seed=seed, imports=tuple(sorted(imports)))
        self._sessions.add(session)
        return session

    async def run(self, code: str, stdin: str = "", **limits: Any) -> ExecResult:
        """One Python program in a box of its own."""
        session = await self.session(**limits)
        try:
            return await session.run(code, stdin)
        finally:
            await session.close()

    # what sessions use

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a free place; the time spent here counts against no limit."""
        async with self._slots:
            yield

    async def box(self, limits: Limits, seed: int | None, imports: tuple[str, ...]) -> tuple[Runner, Channel]:
        """A fresh box on the runner with the fewest. Raises BoxLost, or SandboxUnavailable where none starts."""
        runner = await self._runner(imports)
        try:
            return runner, await runner.open({**asdict(limits), "seed": seed})
        except BoxLost:
            if not runner.boxes:
                await self._replace(runner)
            raise

    def forget(self, session: Session) -> None:
        """A session was closed."""
        self._sessions.discard(session)

    async def _runner(self, imports: tuple[str, ...]) -> Runner:
        """The least busy live runner of a profile; a new one while there are fewer than `workers`."""
        if self._closed:
            raise SandboxUnavailable("The sandbox is closed.")
        async with self._starting:
            pool = self._runners.setdefault(imports, [])
            for dead in [runner for runner in pool if not runner.alive]:
                pool.remove(dead)
                await dead.close()
            idle = [runner for runner in pool if not runner.boxes]
            if not idle and (len(pool) < self.workers or all(runner.full for runner in pool)):
                self._started += 1
                launch = Launch(self.level, imports)
                kind: type[Runner] = resolve("sandbox", RUNNERS, self.level) if self.level in RUNNERS else Runner
                pool.append(await kind.start(launch, self._started, self.limits))
                return pool[-1]
            return min(pool, key=lambda runner: len(runner.boxes))

    async def _replace(self, runner: Runner) -> None:
        for pool in self._runners.values():
            if runner in pool:
                pool.remove(runner)
        await runner.close()

    async def close(self) -> None:
        """Ends every session and runner; returns when their processes are gone."""
        self._closed = True
        for session in list(self._sessions):
            await session.close()
        runners = [runner for pool in self._runners.values() for runner in pool]
        self._runners.clear()
        await asyncio.gather(*(runner.close() for runner in runners))

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
