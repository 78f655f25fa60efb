"""`Sandbox`: warm runners of one isolation level, sized to the machine, with back-pressure and health checks.

    sandbox = await Sandbox.open(config.sandbox)
    session = await sandbox.session()
    result = await session.cell("x = 6 * 7\\nx")
    await sandbox.close()

A level below the configured minimum is an error, never a fallback. A session costs nothing until its first execution.

`kinds_of` returns the levels of isolation that a configuration allows, with the kind of runner behind each.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any, cast

from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.config.yamlfile import read_as
from agentrl_cli.errors import ConfigError, SandboxUnavailable
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import processors
from agentrl_cli.sandbox import cgroup, owner
from agentrl_cli.sandbox.channel import BoxLost
from agentrl_cli.sandbox.pool import GRADING
from agentrl_cli.sandbox.results import ExecResult, package_names
from agentrl_cli.sandbox.runner_process import Runner
from agentrl_cli.sandbox.session import Session, SessionHost

STRENGTH = {"bare": 0, "landlock": 1, "ns": 2, "docker": 3}
"""Levels, weakest first. `ns` and `docker` hold hostile code; `landlock` holds most of it; `bare` holds nothing."""

AUTO = ("ns", "docker", "landlock")
"""What `backend: auto` tries, in this order: `ns` and `docker` hold the same, and `ns` is faster and needs no daemon
that runs as root. `bare` has to be asked for."""

RUNNERS = {
    "ns": "agentrl_cli.sandbox.runner_process:Process",
    "landlock": "agentrl_cli.sandbox.runner_process:Process",
    "bare": "agentrl_cli.sandbox.runner_process:Process",
    "docker": "agentrl_cli.sandbox.container:Container",
}
"""Level → its kind of runner. A user's own backend is named in the configuration as `module:object`."""

_BARE = "Sandbox level bare isolates NOTHING: the model's code runs as "


def bare_warning() -> str:
    """Return level `bare`'s warning for the current user: a runner that root starts becomes another user."""
    if os.geteuid() == 0:
        return (
            _BARE
            + "an ordinary user of this machine, with all files that are open to everyone, and your network."
        )
    return _BARE + "you, with your files and your network."


def runner_kind(level: str) -> type[Runner]:
    """Return the class of a level's runners."""
    return cast(type[Runner], resolve("sandbox", RUNNERS, level))


def kinds_of(backend: str) -> dict[str, type[Runner]]:
    """Return the levels that a backend may run at, in the order to try, with their classes. Raises ConfigError."""
    if backend == "auto":
        return {level: runner_kind(level) for level in AUTO}
    if backend in STRENGTH:
        return {backend: runner_kind(backend)}
    if ":" not in backend:
        raise ConfigError(
            f"Unknown sandbox backend {backend!r}.",
            hint=f"There are: auto, {', '.join(STRENGTH)}, or module:object.",
        )
    kind = resolve("sandbox backends", RUNNERS, backend)
    if not (isinstance(kind, type) and issubclass(kind, Runner)) or kind.level not in STRENGTH:
        raise ConfigError(
            f"{backend} is not a sandbox backend.",
            hint="It has to be a subclass of agentrl_cli.sandbox.runner_process.Runner whose `level` is the level that "
            f"it is as strong as: {', '.join(STRENGTH)}.",
        )
    return {kind.level: kind}


class Sandbox(SessionHost):
    """Where the model's code runs. Made by `open`; `level` is its level of isolation."""

    def __init__(
        self, level: str, limits: LimitsConfig, workers: int, kind: type[Runner] | None = None
    ) -> None:
        super().__init__(level, limits, workers, kind or runner_kind(level))
        self._taken: Counter[str] = Counter()
        self.imports: tuple[str, ...] = ()
        """Packages that every session has."""
        self.seed: int | None = None

    @property
    def warning(self) -> str:
        """The warning to show before code runs here; empty at levels with isolation."""
        return bare_warning() if self.level == "bare" else ""

    @property
    def bounded(self) -> bool:
        """Whether the kernel bounds the number of processes of a box; if not, a fork bomb may outrun the supervisor."""
        found = self.pool.runners.values()
        return all(runner.bounded for runners in found for runner in runners)

    @classmethod
    async def open(cls, config: Any) -> Sandbox:
        """Return the strongest sandbox that `config` (a SandboxConfig) allows, with one runner warm.

        Raises SandboxUnavailable, with the reason and a fix, if only isolation weaker than `config.min_level` works;
        ConfigError if the two settings contradict each other.
        """
        minimum = STRENGTH[config.min_level]
        kinds = kinds_of(config.backend)
        allowed = {level: kind for level, kind in kinds.items() if STRENGTH[level] >= minimum}
        if not allowed:
            raise SandboxUnavailable(
                f"sandbox.backend is {config.backend}, which is weaker than sandbox.min_level {config.min_level}.",
                hint=f"To accept that, set sandbox.min_level: {next(iter(kinds))} too.",
            )
        limits = config.limits
        imports = package_names(config.imports, "sandbox")
        problems: list[SandboxUnavailable] = []
        owner.sweep()
        cgroup.sweep()
        for level, kind in allowed.items():
            sandbox = cls(level, limits, config.workers or min(8, processors()), kind)
            sandbox.imports, sandbox.seed = imports, config.seed
            try:
                await sandbox.check()
                sandbox.pool.start_health_checks()
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
        """Runs one program in a fresh box that has these packages, and keeps that runner warm.

        Raises SandboxUnavailable if that fails, MissingDependency if a package is not installed.
        """
        runner = await self.pool.runner(self._profile(imports))
        try:
            channel = await runner.open(self.limits.model_dump())
            channel.ask({"op": "run", "split": 16, "limits": {"wall": 10.0}}, b"print(6 * 7)    ")
            frame = await channel.answer(20.0)
        except BoxLost as lost:
            raise runner.unavailable(lost.detail) from None
        if frame.body != b"42\n":
            raise runner.unavailable(f"a test program answered {frame.header} {frame.body[:200]!r}")
        runner.spares.append(channel)  # as good as new

    def take_counts(self) -> dict[str, float]:
        """Counts since the last call, as metrics: `sandbox/ok`, `sandbox/timeout`…, `sandbox/limit/cpu`…"""
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
        """Return a session for one episode; nothing is started before its first use.

        `keep`: how many earlier states stay alive so that `back` is immediate. `seed`: of `random` in the session;
        None: the configured one, or else `episode_seed`. `imports`: packages besides the standard library (numpy…) and
        the configured ones. `grading`: the session gets secrets that a running episode must not learn, on a runner that
        holds no other boxes. The rest overrides single limits, e.g. `wall=2.0`.
        """
        given = {**self.limits.model_dump(), **limits}
        known = LimitsConfig.model_fields
        own = read_as(LimitsConfig, given, "the limits of a session", known, strict=True)
        chosen = next((one for one in (seed, self.seed, episode_seed) if one is not None), None)
        profile = self._profile([*imports, GRADING] if grading else imports)
        session = Session(self, own, keep=keep, seed=chosen, imports=profile)
        self.sessions.add(session)
        return session

    async def run(self, code: str, stdin: str = "", **limits: Any) -> ExecResult:
        """Runs one Python program in a box of its own."""
        session = await self.session(**limits)
        try:
            return await session.run(code, stdin)
        finally:
            await session.close()

    def _profile(self, imports: Iterable[str]) -> tuple[str, ...]:
        """Return the purpose of a warm runner: requested and configured packages, and whether it only grades."""
        return tuple(sorted({*self.imports, *imports}))

    async def close(self) -> None:
        """Ends every session and runner; returns when their processes have ended."""
        await self.pool.stop_tasks()
        for session in list(self.sessions):
            await session.close()
        await self.pool.close()

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
