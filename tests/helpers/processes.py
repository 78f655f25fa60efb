"""Other processes: what tests ask about them, through /proc, and servers that run while a test does."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Ids of the processes below one, those of its threads included."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return found + [deeper for child in found for deeper in descendants(child)]


def commands(pattern: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().decode("utf-8", "replace").replace("\0", " "))
    return [line for line in found if re.search(pattern, line) and "pytest" not in line]


def run_code(
    code: str, *args: str, cwd: Path = ROOT, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program in Python, which has to end well."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, **more)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@contextlib.contextmanager
def served(words: Sequence[str], **env: str) -> Iterator[str]:
    """Yield the first line of a command that runs until SIGTERM, such as a server's address."""
    with subprocess.Popen(
        words,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def comes(condition: Callable[[], bool], lives: Callable[[], bool] = lambda: True) -> bool:
    """Wait until a condition holds; False if the process that should bring it about `lives` no more.

    Only the suite's own limit ends the wait, so a slow machine fails nothing.
    """
    pause = 0.01
    while not condition():
        if not lives():
            return condition()
        time.sleep(pause)
        pause = min(1.1 * pause, 0.5)  # looking takes CPU, too
    return True


def free_port() -> int:
    """A port of loopback that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def end_together(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for processes that need each other: one that fails ends the others, which would wait for it."""
    try:
        comes(lambda: any(p.poll() for p in processes) or all(p.poll() == 0 for p in processes))
    finally:
        for process in processes:
            process.kill()


async def soon(condition: Callable[[], bool]) -> bool:
    """Wait as `comes` does, while the event loop runs."""
    while not condition():
        await asyncio.sleep(0.02)
    return True
