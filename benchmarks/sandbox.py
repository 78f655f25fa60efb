"""Executions per wall second in the sandbox, against a plain subprocess and against `docker run --rm`.

    python benchmarks/sandbox.py [--rounds 5] [--seconds 1.5] [--at-once 8] [--json]

Every way runs the same five-line program, eight at a time; rounds are interleaved, and the best round counts, because
other work on the machine only ever makes a round slower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from agentrl_cli.config import SandboxConfig
from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.sandbox import Sandbox

PROGRAM = "def f(x): return x * 2\nassert f(2) == 4\nassert f(0) == 0\nassert f(-1) == -2\nprint('ok')"
NUMPY = "import numpy as np\na = np.arange(100.0).reshape(10, 10)\nprint('ok' if (a @ a).sum() > 0 else '')"

Way = Callable[[int], Awaitable[None]]


def limits() -> None:
    """What the plain subprocess is held by."""
    for which, most in ((resource.RLIMIT_AS, 4 << 30), (resource.RLIMIT_CPU, 5), (resource.RLIMIT_FSIZE, 64 << 20)):
        resource.setrlimit(which, (most, most))


def in_subprocess(code: str, *flags: str) -> Way:
    """subprocess.run in a thread, as a trainer without a sandbox does it."""

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
    command = ["docker", "run", "--rm", "--network", "none", image, "python3", "-I", "-S", "-c", PROGRAM]

    def once() -> None:
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ok\n"

    async def way(_: int) -> None:
        await asyncio.to_thread(once)

    return way


async def sandbox_ways(sandbox: Sandbox, at_once: int, label: str) -> dict[str, Way]:
    """The sandbox's own ways; a session for each of the concurrent users."""
    sessions = [await sandbox.session() for _ in range(at_once)]

    async def fresh(_: int) -> None:
        assert (await sandbox.run(PROGRAM)).stdout == "ok\n"

    async def run(user: int) -> None:
        assert (await sessions[user].run(PROGRAM)).stdout == "ok\n"

    async def cell(user: int) -> None:
        assert (await sessions[user].cell(PROGRAM)).stdout == "ok\n"

    return {f"{label}: program in a fresh box": fresh, f"{label}: program in a session": run, f"{label}: cell": cell}


async def numpy_way(sandbox: Sandbox, at_once: int) -> Way:
    """A numpy program in sessions whose runner imported numpy beforehand."""
    sessions = [await sandbox.session(imports=("numpy",)) for _ in range(at_once)]

    async def run(user: int) -> None:
        assert (await sessions[user].run(NUMPY)).stdout == "ok\n"

    return run


async def rate(way: Way, seconds: float, at_once: int) -> float:
    """Executions per wall second, `at_once` of them at a time."""
    await way(0)
    start = time.perf_counter()
    counts = [0] * at_once

    async def user(number: int) -> None:
        while time.perf_counter() - start < seconds:
            await way(number)
            counts[number] += 1

    await asyncio.gather(*(user(number) for number in range(at_once)))
    return sum(counts) / (time.perf_counter() - start)


async def measure(rounds: int, seconds: float, at_once: int, image: str) -> dict[str, float]:
    """The best rate of every way."""
    ways: dict[str, Way] = {
        "subprocess -I -S with rlimits": in_subprocess(PROGRAM, "-I", "-S"),
        "subprocess that imports numpy": in_subprocess(NUMPY),
    }
    opened: list[Sandbox] = []
    for level in ("ns", "docker", "landlock"):
        try:
            opened.append(await Sandbox.open(SandboxConfig(backend=level, min_level="landlock")))
        except SandboxUnavailable as problem:
            print(f"{level}: {problem.message}", file=sys.stderr)
            continue
        ways |= await sandbox_ways(opened[-1], at_once, level)
        if level == "ns":
            ways["ns: program that imports numpy"] = await numpy_way(opened[-1], at_once)
        if level == "docker" and shutil.which("docker"):
            ways["docker run --rm"] = in_docker_run(image)
    best = dict.fromkeys(ways, 0.0)
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                best[name] = max(best[name], await rate(way, seconds, at_once))
    finally:
        for sandbox in opened:
            await sandbox.close()
    return best


def main() -> None:
    """Measures and prints the table, with ratios to the plain subprocess and to docker run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--image", default="agentrl-sandbox:latest")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    best = asyncio.run(measure(options.rounds, options.seconds, options.at_once, options.image))
    if options.json:
        print(json.dumps(best, indent=2))
        return
    plain, numpy = best["subprocess -I -S with rlimits"], best["subprocess that imports numpy"]
    docker = best.get("docker run --rm")
    print(f"{'executions per second':38} {'rate':>8} {'vs subprocess':>14} {'vs docker run':>14}")
    for name, value in best.items():
        base = numpy if "numpy" in name else plain
        against = f"{value / docker:13.1f}x" if docker else ""
        print(f"{name:38} {value:8.1f} {value / base:13.1f}x {against:>14}")


if __name__ == "__main__":
    main()
