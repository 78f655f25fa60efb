"""What hostile code could do with the moments around an answer: hold it back, or go on after it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import SandboxConfig
from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.paths import sandbox_dir
from agentrl_cli.sandbox import Sandbox


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    try:
        opened = await Sandbox.open(SandboxConfig(workers=1))
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    async with opened:
        yield opened


DRIBBLE = """
import os, struct, time
os.write(3, struct.pack("!II", 60_000, 0))
for _ in range(100):
    os.write(3, b"x")
    time.sleep(0.2)
"""


async def test_an_answer_that_comes_in_drops_is_the_codes_own_fault(sandbox: Sandbox) -> None:
    session = await sandbox.session(wall=1.0)
    await session.cell("x = 6")
    begun = time.monotonic()
    result = await session.cell(DRIBBLE)
    assert (result.status, result.rolled_back) == ("crashed", True), result
    assert time.monotonic() - begun < 5.0
    assert (await session.cell("x * 7")).stdout == "42\n"
    assert not any(name.startswith("sandbox_") for name in sandbox.counts), sandbox.counts


TICKS = """
import signal
ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
_ = signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
"""


async def test_no_handler_goes_on_while_nothing_is_asked(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    assert (await session.cell(TICKS)).ok
    await asyncio.sleep(1.0)
    result = await session.cell("_ = signal.setitimer(signal.ITIMER_REAL, 0)\nprint(ticks)")
    assert result.ok and int(result.stdout) < 20, result.text()


LEAVES = """
import os, time
def leave():
    if not os.fork():
        os.setsid()
        time.sleep(30)
    os._exit(1)
def look():
    return sum(name.isdecimal() for name in os.listdir("/proc"))
"""


async def test_a_call_that_fails_leaves_nothing_to_the_next(sandbox: Sandbox) -> None:
    if sandbox.level != "ns":
        pytest.skip("elsewhere /proc shows more than the box")
    session = await sandbox.session()
    await session.cell(LEAVES)
    calls: list[list[Any]] = [[name, [], {}] for name in ("look", "leave", "look")]
    answers, body = await session.calls(calls)
    assert [answer.status for answer in answers] == ["ok", "exit", "ok"], answers
    first, last = body[: answers[0].size], body[answers[0].size :]
    assert first == last


LOOK = """
import os, sys, time
import confine, snapshot
confine.WORK = sys.argv[1]
for name in (".tmp", ".shm"):
    os.mkdir(f"{confine.WORK}/{name}")
files = snapshot.Files(1 << 20, None)
seen = []
for snapshot._TICK, pause in ((10**12, 0), (0, 0.05), (0, 0)):
    time.sleep(pause)
    found = files.take()
    seen.append((len(found), bool(files._empty)))
snapshot._TICK = 10**12
os.rename(f"{confine.WORK}/.tmp", f"{confine.WORK}/other")
seen.append((sorted(files.take()), bool(files._empty)))
print(seen == [(3, False), (3, True), (3, True), (["", ".shm", "other"], False)], seen)
"""


def test_a_fresh_folder_is_looked_at_again(tmp_path: Path) -> None:
    """Its clock may not have moved on between the look and a change."""
    env = {**os.environ, "PYTHONPATH": str(sandbox_dir())}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("True"), done.stdout + done.stderr
