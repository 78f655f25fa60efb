"""The guest runs on every Python that the package supports, whichever runs the host."""

import subprocess
from typing import Any

import pytest

from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.sandbox import Limits
from agentrl_cli.sandbox.launch import Launch
from agentrl_cli.sandbox.runner_process import Process

WHERE = "import sys; print(sys.version_info[:2] == (3, int(sys.argv[1])), sys.executable, sys.base_prefix, sep='\\n')"
PROGRAM = b"import atexit, threading\natexit.register(print, 2)\nthreading.Thread(target=print, args=(1,)).start()"


def interpreter(minor: int) -> tuple[str, str]:
    """Path and prefix of Python 3.`minor`; skips the test if absent."""
    try:
        done = subprocess.run(
            [f"python3.{minor}", "-c", WHERE, str(minor)],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"Python 3.{minor} is not installed")
    right, python, prefix = done.stdout.splitlines()
    assert right == "True"
    return python, prefix


@pytest.mark.parametrize("minor", [11, 12, 13])
async def test_programs_cells_and_rollback_work_on(minor: int) -> None:
    python, prefix = interpreter(minor)
    try:
        runner = await Process.start(Launch("ns", (), python, prefix), 1, Limits())
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    try:
        channel = await runner.open(Limits().model_dump())

        async def ask(op: str, code: bytes) -> tuple[Any, bytes]:
            channel.ask({"op": op, "split": len(code)}, code)
            frame = await channel.answer(20.0)
            return frame.header["status"], frame.body

        for _ in range(3):  # the first by a fork of the box, the last by a template
            assert await ask("run", PROGRAM) == ("ok", b"1\n2\n")
            assert await ask("run", b"print(1)") == ("ok", b"1\n")
        assert await ask("cell", b"x = 41\nimport os") == ("ok", b"")
        for _ in range(2):
            assert await ask("cell", b"x = 0\nos.kill(os.getpid(), 9)") == ("crashed", b"")
            assert await ask("cell", b"x + 1") == ("ok", b"42\n")
    finally:
        await runner.close()
