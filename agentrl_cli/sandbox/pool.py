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
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, fields
from types import TracebackType
from typing import Any

from agentrl_cli.errors import AgentRLError, ConfigError, SandboxUnavailable
from agentrl_cli.registry import resolve
from agentrl_cli.sandbox import cgroup
from agentrl_cli.sandbox import launch as launching
from agentrl_cli.sandbox.channel import BoxLost, Channel
from agentrl_cli.sandbox.launch import Launch
from agentrl_cli.sandbox.options import package_names
from agentrl_cli.sandbox.results import ExecResult, Limits, limit_of
from agentrl_cli.sandbox.runner_process import AT_ONCE, Runner
from agentrl_cli.sandbox.session import Session

STRENGTH = {"bare": 0, "landlock": 1, "ns": 2, "docker": 3}
"""Levels, weakest first. `ns` and `docker` hold hostile code; `landlock` holds most of it; `bare` holds nothing."""

_BARE = "Sandbox level bare isolates NOTHING: the model's code runs as "

AUTO = ("ns", "docker", "landlock")
"""What `backend: auto` tries, in this order: `ns` and `docker` hold the same, `ns` faster and without a daemon that is
root; `bare` is never chosen, only asked for."""

SEEN = ("docker", "landlock")
"""Levels at which boxes of one runner see something of each other, such as the names of processes."""

RUNNERS = {
    "ns": "agentrl_cli.sandbox.runner_process:Process",
    "landlock": "agentrl_cli.sandbox.runner_process:Process",
    "bare": "agentrl_cli.sandbox.runner_process:Process",
    "docker": "agentrl_cli.sandbox.container:Container",
}
"""Level → its kind of runner. A backend of your own is named in the configuration as `module:object`."""

GRADING = "@grading"
"""In a profile, beside the names of packages: its runners hold the boxes of grading alone."""
SPARES = 4
"""Boxes that every runner keeps ready for sessions to come: a box takes longer to start than most programs run."""
HEALTH = 5.0
"""Seconds between two looks at what is idle."""
_FRESH = 2.0
"""Seconds for which a spare box counts as well once it has answered; later it is asked first."""


class Sandbox:
    """Where the model's code runs. Made by `open`; `level` says how strongly it is held."""

    def __init__(self, level: str, limits: Limits, workers: int, kind: type[Runner] | None = None) -> None:
        self.level = level
        self.limits = limits
        self.workers = workers
        self.counts: Counter[str] = Counter()
        """How many executions ended with each status, ours included."""
        self.limits_hit: Counter[str] = Counter()
        """How many executions met each limit, by its name in the configuration."""
        self._taken: Counter[str] = Counter()
        self.imports: tuple[str, ...] = ()
        """Packages that every session has."""
        self.seed: int | None = None
        self._kind: type[Runner] = kind or resolve("sandbox", RUNNERS, level)
        self._runners: dict[tuple[str, ...], list[Runner]] = {}
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(workers * AT_ONCE)
        self._started = 0
        self._closed = False
        self._sessions: set[Session] = set()
        self._tasks: dict[tuple[str, ...] | None, asyncio.Task[None]] = {}
        """What goes on in the background: for a profile, starting runners and spare boxes; None: looking after them."""

    @property
    def warning(self) -> str:
        """What people must be told before code runs here; empty where there is isolation."""
        return bare_warning() if self.level == "bare" else ""

    @property
    def bounded(self) -> bool:
        """Whether the kernel bounds the number of processes of a box; else a fork bomb may outrun the watch."""
        return all(runner.bounded for pool in self._runners.values() for runner in pool)

    @classmethod
    async def open(cls, config: Any) -> Sandbox:
        """The strongest sandbox that `config` (a SandboxConfig) allows, with one runner warm.

        Raises SandboxUnavailable where only weaker isolation than `config.min_level` is to be had, saying why and
        how to get it; ConfigError where the two settings contradict each other.
        """
        minimum = STRENGTH[config.min_level]
        kinds = {level: None for level in AUTO} if config.backend == "auto" else _own_kind(config.backend)
        allowed = {level: kind for level, kind in kinds.items() if STRENGTH[level] >= minimum}
        if not allowed:
            raise SandboxUnavailable(
                f"sandbox.backend is {config.backend}, which is weaker than sandbox.min_level {config.min_level}.",
                hint=f"To accept that, set sandbox.min_level: {next(iter(kinds))} too.",
            )
        limits = Limits(**{field.name: getattr(config, field.name) for field in fields(Limits)})
        imports = package_names(config.imports, "sandbox")
        problems: list[SandboxUnavailable] = []
        launching.sweep()
        cgroup.sweep()
        for level, kind in allowed.items():
            sandbox = cls(level, limits, config.workers or min(8, cores()), kind)
            sandbox.imports, sandbox.seed = imports, config.seed
            try:
                await sandbox.check()
                sandbox._tasks[None] = asyncio.create_task(sandbox._look_after())
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

    async def check(self, imports: Iterable[str] = ()) -> None:
        """Runs one program in a fresh box where these packages are to be had, and keeps that runner warm.

        Raises SandboxUnavailable where that does not work, MissingDependency where a package is not installed.
        """
        runner = await self._runner(self._profile(imports))
        try:
            channel = await runner.open(asdict(self.limits))
            channel.ask({"op": "run", "split": 16, "limits": {"wall": 10.0}}, b"print(6 * 7)    ")
            frame = await channel.answer(20.0)
        except BoxLost as lost:
            raise runner.unavailable(lost.detail) from None
        if frame.body != b"42\n":
            raise runner.unavailable(f"a test program answered {frame.header} {frame.body[:200]!r}")
        runner.spares.append(channel)  # as good as new

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call, as metrics: `sandbox/ok`, `sandbox/timeout`…, `sandbox/limit/cpu`…"""
        now = Counter({f"sandbox/{status}": number for status, number in self.counts.items()})
        now.update({f"sandbox/limit/{limit}": number for limit, number in self.limits_hit.items()})
        new, self._taken = now - self._taken, now
        return {name: float(number) for name, number in sorted(new.items())}

    async def session(
        self,
        *,
        keep: int = 0,
        seed: int | None = None,
        episode_seed: int | None = None,
        imports: Iterable[str] = (),
        grading: bool = False,
        **limits: Any,
    ) -> Session:
        """A session for one episode; nothing is started before its first use.

        `keep`: how many earlier states stay alive so that `back` is immediate. `seed`: of `random` in the session;
        None: the configured one, and where there is none `episode_seed`. `imports`: packages besides the standard
        library (numpy…) and the configured ones. `grading`: it gets what a running episode must not learn. The rest
        overrides single limits, e.g. `wall=2.0`.
        """
        unknown = limits.keys() - {field.name for field in fields(Limits)}
        if unknown:
            raise ConfigError(f"Unknown limit {min(unknown)!r}.", hint=f"There are: {', '.join(asdict(self.limits))}.")
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"The limit {name} is {value!r}; it has to be a number above 0.")
        own = Limits(**{**asdict(self.limits), **limits})
        chosen = next((one for one in (seed, self.seed, episode_seed) if one is not None), None)
        profile = self._profile([*imports, GRADING] if grading and self.level in SEEN else imports)
        session = Session(self, own, keep=keep, seed=chosen, imports=profile)
        self._sessions.add(session)
        return session

    async def run(self, code: str, stdin: str = "", **limits: Any) -> ExecResult:
        """One Python program in a box of its own."""
        session = await self.session(**limits)
        try:
            return await session.run(code, stdin)
        finally:
            await session.close()

    def _profile(self, imports: Iterable[str]) -> tuple[str, ...]:
        """What a warm runner is for: the packages asked for and the configured ones, and whether it only grades."""
        return tuple(sorted({*self.imports, *imports}))

    # what sessions use

    def count(self, status: str, detail: str = "") -> None:
        """Counts how an execution ended, and the limit that ended it."""
        self.counts[status] += 1
        if limit := limit_of(status, detail):
            self.limits_hit[limit] += 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a free place; the time spent here counts against no limit."""
        async with self._slots:
            yield

    async def box(self, limits: Limits, seed: int | None, imports: tuple[str, ...]) -> tuple[Runner, Channel]:
        """A box on the least busy runner, one that stands ready if there is one.

        Raises BoxLost, or SandboxUnavailable where none starts.
        """
        runner = await self._runner(imports)
        own = {**asdict(limits), "seed": seed}
        try:
            while runner.fits(limits) and runner.spares:
                channel = runner.spares.pop()
                if await _is_well(channel):
                    runner.adopt(channel, own)
                    return runner, channel
                runner.drop(channel)
                if not runner.busy:  # it may be stuck as a whole, and nobody loses anything
                    await self._replace(runner)
                    runner = await self._runner(imports)
            return runner, await runner.open(own)
        except BoxLost:
            if not runner.busy:
                await self._replace(runner)
            raise
        finally:
            self._prepare(imports)

    def forget(self, session: Session) -> None:
        """A session was closed."""
        self._sessions.discard(session)

    async def _runner(self, imports: tuple[str, ...]) -> Runner:
        """The least busy live runner of a profile; a new one where there is none that has room."""
        if self._closed:
            raise SandboxUnavailable("The sandbox is closed.")
        async with self._starting:
            pool = self._runners.setdefault(imports, [])
            for dead in [runner for runner in pool if not runner.alive]:
                pool.remove(dead)
                await dead.close()
            if all(runner.full for runner in pool):
                await self._start(imports)
            return min(pool, key=lambda runner: (runner.full, runner.busy, -len(runner.spares)))

    async def _start(self, imports: tuple[str, ...]) -> None:
        self._started += 1
        launch = Launch(self.level, tuple(name for name in imports if name != GRADING))
        self._runners[imports].append(await self._kind.start(launch, self._started, self.limits))

    def _prepare(self, imports: tuple[str, ...]) -> None:
        """A box was taken: in the background more are started, and more runners where all have work."""
        running = self._tasks.get(imports)
        if not self._closed and (running is None or running.done()):
            self._tasks[imports] = asyncio.create_task(self._stock(imports))

    async def _stock(self, imports: tuple[str, ...]) -> None:
        """Starts what is missing of runners and spare boxes. What fails here fails again, and is said, when needed."""
        with suppress(BoxLost, AgentRLError, OSError):
            async with self._starting:
                pool = self._runners[imports]
                while len(pool) < self.workers and all(runner.busy for runner in pool):
                    await self._start(imports)
            while hungry := [r for r in pool if r.alive and not r.full and len(r.spares) < SPARES]:
                runner = min(hungry, key=lambda runner: len(runner.spares))
                runner.spares.insert(0, await runner.open(asdict(self.limits)))

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(HEALTH)
            await self.inspect()

    async def inspect(self) -> None:
        """Replaces runners that are dead or stuck, and spare boxes that do not answer; done every few seconds."""
        for imports, pool in list(self._runners.items()):
            before = len(pool)
            for runner in list(pool):
                if not _is_alive(runner):
                    await self._replace(runner)
                    continue
                for channel in [spare for spare in runner.spares if time.monotonic() - spare.heard > _FRESH]:
                    if channel not in runner.spares:
                        continue  # a session took it meanwhile
                    runner.spares.remove(channel)
                    if await _is_well(channel):
                        runner.spares.insert(0, channel)
                    else:
                        runner.drop(channel)
            if len(pool) < before or any(len(runner.spares) < SPARES for runner in pool):
                self._prepare(imports)

    async def _replace(self, runner: Runner) -> None:
        for pool in self._runners.values():
            if runner in pool:
                pool.remove(runner)
        await runner.close()

    async def close(self) -> None:
        """Ends every session and runner; returns when their processes are gone."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
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


def bare_warning() -> str:
    """What level `bare` means for who we are: a runner that root starts becomes another user."""
    if os.geteuid() == 0:
        return _BARE + "an ordinary user of this machine, with all files that are open to everyone, and your network."
    return _BARE + "you, with your files and your network."


def _own_kind(backend: str) -> dict[str, type[Runner] | None]:
    """The level of a backend, and the class of its runner where it is not one of ours. Raises ConfigError."""
    if backend in STRENGTH:
        return {backend: None}
    if ":" not in backend:
        raise ConfigError(
            f"Unknown sandbox backend {backend!r}.", hint=f"There are: auto, {', '.join(STRENGTH)}, or module:object."
        )
    kind = resolve("sandbox backends", RUNNERS, backend)
    if not (isinstance(kind, type) and issubclass(kind, Runner)) or kind.level not in STRENGTH:
        raise ConfigError(
            f"{backend} is no backend of a sandbox.",
            hint="It has to be a subclass of agentrl_cli.sandbox.runner_process.Runner whose `level` says how strong "
            f"it is: {', '.join(STRENGTH)}.",
        )
    return {kind.level: kind}


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_alive(runner: Runner) -> bool:
    try:
        return runner.alive and not runner.stuck()
    except BoxLost:
        return False


async def _is_well(channel: Channel) -> bool:
    """Whether a spare box answers; one that did so a moment ago is not asked again."""
    if channel.lost is None and time.monotonic() - channel.heard < _FRESH:
        return True
    try:
        channel.ask({"op": "ping"})
        await channel.answer(_FRESH)
    except BoxLost as lost:
        channel.lost = BoxLost(lost.status, lost.detail)  # no reason to end its runner
        return False
    return True
