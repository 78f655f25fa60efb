"""Executions per wall second in the sandbox, against a plain subprocess and against `docker run --rm`.

    python benchmarks/sandbox.py [--rounds 5] [--seconds 1.5] [--at-once 8] [--levels ns,docker,landlock] [--json]
    python benchmarks/sandbox.py --soak 10000 [--levels ns]

Every way runs the same five-line program, eight at a time; rounds are interleaved, and the best round counts, because
other work on the machine only ever makes a round slower. If cgroups of version 1 count CPU time and one can be made,
the CPU milliseconds of one execution are shown too, of all its processes; they hardly depend on other work.

`--soak` runs that many executions in a row and compares processes, descriptors and memory with those after the first
twentieth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl_cli.config import SandboxConfig
from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.sandbox.container import Container

PROGRAM = (
    "def f(x): return x * 2\nassert f(2) == 4\nassert f(0) == 0\nassert f(-1) == -2\nprint('ok')"
)
NUMPY = "import numpy as np\na = np.arange(100.0).reshape(10, 10)\nprint('ok' if (a @ a).sum() > 0 else '')"

Way = Callable[[int], Awaitable[None]]


def limits() -> None:
    """The limits of the plain subprocess."""
    for which, most in (
        (resource.RLIMIT_AS, 4 << 30),
        (resource.RLIMIT_CPU, 5),
        (resource.RLIMIT_FSIZE, 64 << 20),
    ):
        resource.setrlimit(which, (most, most))


def in_subprocess(code: str, *flags: str) -> Way:
    """subprocess.run in a thread, as in a trainer without a sandbox."""

    def once() -> None:
        done = subprocess.run(
            [sys.executable, *flags, "-c", code],
            capture_output=True, text=True, timeout=30, preexec_fn=limits, check=True,
        )  # fmt: skip
        assert done.stdout == "ok\n"

    async def way(_: int) -> None:
        await asyncio.to_thread(once)

    return way


def in_docker_run(image: str) -> Way:
    """A container for every program."""
    command = [
        "docker",
        "run",
        "--rm",
        "--network",
        "none",
        image,
        "python3",
        "-I",
        "-S",
        "-c",
        PROGRAM,
    ]

    def once() -> None:
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ok\n"

    async def way(_: int) -> None:
        await asyncio.to_thread(once)

    return way


async def sandbox_ways(sandbox: Sandbox, at_once: int, label: str) -> dict[str, Way]:
    """The sandbox's ways, with one session per concurrent user."""
    sessions = [await sandbox.session() for _ in range(at_once)]

    async def fresh(_: int) -> None:
        assert (await sandbox.run(PROGRAM)).stdout == "ok\n"

    async def run(user: int) -> None:
        assert (await sessions[user].run(PROGRAM)).stdout == "ok\n"

    async def cell(user: int) -> None:
        assert (await sessions[user].cell(PROGRAM)).stdout == "ok\n"

    return {
        f"{label}: program in a fresh box": fresh,
        f"{label}: program in a session": run,
        f"{label}: cell": cell,
    }


async def numpy_way(sandbox: Sandbox, at_once: int) -> Way:
    """A numpy program in sessions whose runner imported numpy beforehand."""
    sessions = [await sandbox.session(imports=("numpy",)) for _ in range(at_once)]

    async def run(user: int) -> None:
        assert (await sessions[user].run(NUMPY)).stdout == "ok\n"

    return run


async def rate(way: Way, seconds: float, at_once: int) -> tuple[int, float]:
    """The number of executions, and their rate per wall second, `at_once` of them at a time."""
    await way(0)
    start = time.perf_counter()
    counts = [0] * at_once

    async def user(number: int) -> None:
        while time.perf_counter() - start < seconds:
            await way(number)
            counts[number] += 1

    await asyncio.gather(*(user(number) for number in range(at_once)))
    return sum(counts), sum(counts) / (time.perf_counter() - start)


class Cpu:
    """CPU seconds of this process, what it starts, and Docker's containers; 0 if cgroups do not count them."""

    def __init__(self) -> None:
        self.group = Path("/sys/fs/cgroup/cpuacct", f"agentrl-bench-{os.getpid()}")
        try:
            self.group.mkdir()
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self.group = Path("/nonexistent")

    def seconds(self) -> float:
        """CPU seconds since an arbitrary time."""
        total = 0
        for folder in (self.group, self.group.parent / "docker"):
            file = folder / "cpuacct.usage"
            total += int(file.read_text()) if file.exists() else 0
        return total / 1e9 if self.group.exists() else 0.0

    def close(self) -> None:
        """Leaves the group and removes it."""
        if self.group.exists():
            (self.group.parent / "cgroup.procs").write_text(str(os.getpid()))
            self.group.rmdir()


async def open_levels(levels: list[str]) -> list[Sandbox]:
    """A sandbox of each level that works here."""
    opened: list[Sandbox] = []
    for level in levels:
        try:
            settings = SandboxConfig(backend=level, min_level="landlock")
            opened.append(await Sandbox.open(settings))
        except SandboxUnavailable as problem:
            print(f"{level}: {problem.message} {problem.hint}", file=sys.stderr)
    return opened


async def measure(
    rounds: int, seconds: float, at_once: int, image: str, levels: list[str]
) -> dict[str, tuple[float, float]]:
    """The best rate of every way, and the least CPU milliseconds of one execution."""
    ways: dict[str, Way] = {
        "subprocess -I -S with rlimits": in_subprocess(PROGRAM, "-I", "-S"),
        "subprocess that imports numpy": in_subprocess(NUMPY),
    }
    cpu = Cpu()
    opened = await open_levels(levels)
    for sandbox in opened:
        ways |= await sandbox_ways(sandbox, at_once, sandbox.level)
        if sandbox.level == "ns":
            ways["ns: program that imports numpy"] = await numpy_way(sandbox, at_once)
        if sandbox.level == "docker" and shutil.which("docker"):
            ways["docker run --rm"] = in_docker_run(image)
    best = dict.fromkeys(ways, (0.0, float("inf")))
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                before = cpu.seconds()
                number, speed = await rate(way, seconds, at_once)
                used = 1000 * (cpu.seconds() - before) / number
                best[name] = max(best[name][0], speed), min(best[name][1], used)
    finally:
        for sandbox in opened:
            await sandbox.close()
        cpu.close()
    return best


async def soak(level: str, number: int, at_once: int = 8) -> tuple[dict[str, int], dict[str, int]]:
    """Many executions in a row: resources after the first twentieth, and at the end."""
    async with await Sandbox.open(
        SandboxConfig(backend=level, min_level="landlock", workers=2)
    ) as sandbox:

        async def user(executions: int) -> None:
            for first in range(
                0, executions, 20
            ):  # twenty in a session, as an episode has, two of them graders' boxes
                session = await sandbox.session()
                for turn in range(min(20, executions - first)):
                    run = (
                        sandbox.run if turn % 10 == 9 else session.cell if turn % 2 else session.run
                    )
                    assert (await run(PROGRAM)).stdout == "ok\n"
                await session.close()

        async def batch(size: int) -> None:
            await asyncio.gather(*(user(size // at_once) for _ in range(at_once)))
            await asyncio.sleep(0.5)

        await batch(number // 20)
        tops = [os.getpid(), *containers(sandbox)]
        before = held(tops)
        await batch(number - number // 20)
        return before, held(tops)


def containers(sandbox: Sandbox) -> list[int]:
    """The first process of each of its containers, as this machine knows it."""
    runners = [
        runner
        for pool in sandbox.pool.runners.values()
        for runner in pool
        if isinstance(runner, Container)
    ]
    return [runner.api.inspect_container(runner.id)["State"]["Pid"] for runner in runners]


def held(tops: list[int]) -> dict[str, int]:
    """Number of processes, open descriptors and KiB of memory of these processes and their descendants."""
    found, queue = {"processes": 0, "descriptors": 0, "memory_kib": 0}, list(tops)
    while queue:
        one = Path("/proc", str(queue.pop()))
        try:
            for task in (one / "task").iterdir():
                queue += map(int, (task / "children").read_text().split())
            status = dict(line.split(":", 1) for line in (one / "status").read_text().splitlines())
            found["descriptors"] += len(list((one / "fd").iterdir()))
            found["memory_kib"] += int(status["RssAnon"].split()[0])
            found["processes"] += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def main() -> None:
    """Measures and prints the table, with ratios to the plain subprocess and to docker run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--image", default="agentrl-sandbox:latest")
    parser.add_argument("--levels", default="ns,docker,landlock")
    parser.add_argument(
        "--soak", type=int, default=0, metavar="N", help="instead: N executions in a row, no growth"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    levels = options.levels.split(",")
    if options.soak:
        for level in levels:
            start = time.perf_counter()
            before, after = asyncio.run(soak(level, options.soak, options.at_once))
            print(
                f"{level}: {options.soak} executions in {time.perf_counter() - start:.0f} s: {before} -> {after}"
            )
        return
    best = asyncio.run(
        measure(options.rounds, options.seconds, options.at_once, options.image, levels)
    )
    if options.json:
        print(json.dumps(best, indent=2))
        return
    show(best)


def show(best: dict[str, tuple[float, float]]) -> None:
    """The table: rate and CPU, and their ratios to a plain subprocess and to docker run."""
    docker = best.get("docker run --rm")
    print(
        f"{'executions':38} {'per s':>8} {'CPU ms':>8} {'vs subprocess':>16} {'vs docker run':>16}"
    )
    for name, value in best.items():
        base = best[
            "subprocess that imports numpy" if "numpy" in name else "subprocess -I -S with rlimits"
        ]
        print(
            f"{name:38} {value[0]:8.1f} {value[1]:8.2f} {against(value, base):>16} {against(value, docker):>16}"
        )
    print("Ratios: of the rates / of the CPU times.")


def against(value: tuple[float, float], base: tuple[float, float] | None) -> str:
    """Both ratios as text."""
    if base is None:
        return ""
    return (
        f"{value[0] / base[0]:.1f}x / {base[1] / value[1]:.1f}x"
        if value[1]
        else f"{value[0] / base[0]:.1f}x"
    )


if __name__ == "__main__":
    main()
