"""Sockets that honest programs need still work, and kills in other sessions change no result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.sandbox import Sandbox, Status, container, grade, image
from agentrl_cli.sandbox.channel import guest_module
from tests.helpers.sandbox import open_sandbox

HONEST = """
import asyncio, concurrent.futures, multiprocessing, socket, sqlite3, subprocess, tempfile

async def main():
    done = await asyncio.create_subprocess_exec('echo', 'child', stdout=-1)
    loop = asyncio.get_running_loop()
    return (await done.communicate())[0].decode().strip(), await loop.run_in_executor(None, str, 'thread')

def square(n, results): results.send(n * n)

if __name__ == '__main__':
    print(*asyncio.run(main()))
    fork = multiprocessing.get_context('fork')
    here, there = fork.Pipe()
    workers = [fork.Process(target=square, args=(n, there)) for n in range(3)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    print(sorted(here.recv() for _ in workers))
    left, right = socket.socketpair()
    left.sendall(b'pair'); print(right.recv(4).decode())
    socket.send_fds(left, [b'f'], [left.fileno()]); print(len(socket.recv_fds(right, 1, 1)[1]))
    with sqlite3.connect('rows.db') as db: print(db.execute('select 6 * 7').fetchone()[0])
    with tempfile.TemporaryFile() as file: print(file.write(b'temporary'))
"""


async def opened(level: str) -> Sandbox:
    return await open_sandbox(backend=level, min_level="landlock", workers=1, wall=10.0)


@pytest.mark.parametrize("level", ["ns", "landlock"])
async def test_what_honest_programs_need_of_sockets_works(level: str) -> None:
    async with await opened(level) as sandbox:
        result = await sandbox.run(HONEST)
    assert result.ok, result.text()
    assert result.stdout.split("\n") == ["child thread", "[0, 1, 4]", "pair", "1", "42", "9", ""]


@pytest.mark.parametrize("counted", [True, False])
def test_the_filter_for_code_is_built_for_every_machine(counted: bool) -> None:
    for machine in ("x86_64", "aarch64"):
        program = guest_module("isolation/seccomp").build_for_code(counted, machine)
        assert len(program) % 8 == 0 and len(program) // 8 < 200


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 40 MiB, in which processes are killed while gigabytes are free elsewhere."""
    folder = Path(f"/sys/fs/cgroup/memory/agentrl-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(40 << 20))
    except OSError as problem:
        pytest.skip(f"no memory cgroup can be made: {problem}")
    yield folder
    folder.rmdir()


def test_a_kill_for_memory_elsewhere_is_counted_only_if_this_execution_was_killed(small_group: Path) -> None:
    kills = guest_module("memory").OutOfMemoryKills([])
    kills.since(over=False, killed=False)
    bomb = f"import os; open('{small_group}/cgroup.procs', 'w').write(str(os.getpid())); b'x' * (300 << 20)"
    for killed, whose in ((False, ""), (True, "others")):
        assert subprocess.run([sys.executable, "-S", "-c", bomb], check=False).returncode == -9
        assert kills.since(over=False, killed=killed) == whose
    for fd in kills.fds:
        os.close(fd)


async def test_at_docker_a_kill_elsewhere_changes_no_result(small_group: Path) -> None:
    bomb = f"import os; open('{small_group}/cgroup.procs', 'w').write(str(os.getpid())); b'x' * (300 << 20)"
    try:
        engine = container.connect()
        image.build(engine)
        engine.close()
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    async with await opened("docker") as sandbox:
        session = await sandbox.session()
        for code, status in {
            "print(1)": Status.OK,
            "1 / 0": Status.EXCEPTION,
            "raise SystemExit(3)": Status.EXIT,
        }.items():
            await session.cell("0")
            assert subprocess.run([sys.executable, "-S", "-c", bomb], check=False).returncode == -9
            assert (await session.run(code)).status is status
        assert not any(name.startswith(("host", "sandbox")) for name in sandbox.counts), sandbox.counts


LINES = "".join(f"{n:06d}\n" for n in range(15_000))


async def test_right_output_that_is_long_is_right() -> None:
    async with await opened("ns") as sandbox:
        session = await sandbox.session()
        long = {"stdin": "", "stdout": LINES}
        right = await grade(session, "for n in range(15_000): print(f'{n:06d} ')", [long])
        assert len(LINES) > 100_000 and (right.passed, right.failures) == (1, ())
        wrong = await grade(session, "for n in range(15_000): print(f'{n:06d}' if n != 7000 else 'x')", [long])
        assert wrong.passed == 0 and "expected" in wrong.failures[0]
        cut = await grade(session, "for n in range(99_000): print(f'{n:06d}')", [long])
        assert cut.passed == 0 and "KiB of output that are compared" in cut.failures[0]
        # A cut that is shorter than the line that reports it is one, too.
        result = await session.run("print('x' * (64 * 1024 + 4))")
        assert result.truncated and "5 bytes left out" in result.stdout
