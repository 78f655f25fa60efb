"""Executions, sessions, roll back, files, limits: each result by its name, and the next execution right."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl_cli.config import SandboxConfig
from agentrl_cli.errors import ConfigError, MissingDependency, SandboxFault, SandboxUnavailable, UsageError
from agentrl_cli.sandbox import Sandbox, Session, Status
from agentrl_cli.sandbox.channel import inside
from agentrl_cli.tools.base import ToolContext
from agentrl_cli.tools.run_python import TOOL as run_python


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    try:
        opened = await Sandbox.open(SandboxConfig(workers=1, wall=2.0))
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    async with opened:
        yield opened


@pytest.fixture
async def session(sandbox: Sandbox) -> Session:
    return await sandbox.session()


async def test_cells_share_variables_and_imports(session: Session) -> None:
    first = await session.cell("import math\nx = 6")
    second = await session.cell("print(math.sqrt(x * 6))\nx + 1")
    assert (first.ok, first.text(), second.stdout, second.level) == (True, "[no output]", "6.0\n7\n", "ns")


async def test_an_exception_keeps_what_the_cell_had_done(session: Session) -> None:
    failed = await session.cell("x = 1\ny = x / 0")
    assert (failed.status, failed.detail, failed.rolled_back) == (Status.EXCEPTION, "ZeroDivisionError", False)
    assert failed.text().splitlines()[0].startswith("Traceback") and "y = x / 0" in failed.text()
    assert (await session.cell("x")).stdout == "1\n"


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("x = 2\nwhile True: pass", Status.TIMEOUT, "timed out after 0.4 s; variables from this cell were discarded"),
        ("x = 2\nimport os; os.abort()", Status.CRASHED, "crashed with SIGABRT"),
        ("x = 2\nimport ctypes; ctypes.string_at(0)", Status.CRASHED, "crashed with SIGSEGV"),
        ("x = 2\nb = bytearray(4 << 30)", Status.MEMORY, "out of memory: the limit is 1024 MiB"),
        ("x = 2\nimport os; os._exit(3)", Status.EXIT, "exited with code 3"),
        ("x = 2\nwhile True: print('a' * 100000)", Status.OUTPUT_LIMIT, "more than 16 MiB"),
    ],
)
async def test_a_cell_that_does_not_end_well_is_rolled_back(
    session: Session, code: str, status: Status, says: str
) -> None:
    await session.cell("x = 1\nimport random; random.seed(5)")
    result = await session.cell(code, wall=0.4 if status is Status.TIMEOUT else None)
    assert (result.status, result.state_kept, result.rolled_back) == (status, True, True)
    assert says in result.text() and "earlier ones are kept" in result.text()
    assert (await session.cell("x, random.random()")).stdout == "(1, 0.6229016948897019)\n"


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("import sys; sys.exit(4)", Status.EXIT, ""),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", Status.BLOCKED, "net"),
        ("open('/usr/x', 'w')", Status.BLOCKED, "fs"),
        ("open('f', 'wb').write(bytes(70 << 20))", Status.DISK_LIMIT, "a file is too large"),
        ("for i in range(5000): open(str(i), 'w').close()", Status.DISK_LIMIT, "the work folder is full"),
        ("import os\nwhile os.fork(): pass\nimport time; time.sleep(9)", Status.PROCESS_LIMIT, "processes"),
        ("class E(Exception):\n  def __str__(self): return 1 / 0\nraise E", Status.EXCEPTION, "E"),
        ("def f(:", Status.EXCEPTION, "SyntaxError"),
    ],
)
async def test_a_cell_that_meets_a_limit_keeps_its_state(
    session: Session, code: str, status: Status, detail: str
) -> None:
    await session.cell("x = 1")
    result = await session.cell(code)
    assert (result.status, result.detail, result.state_kept, result.rolled_back) == (status, detail, True, False)
    assert (await session.cell("x")).stdout == "1\n"


async def test_killing_what_keeps_the_state_is_named(session: Session) -> None:
    await session.cell("x = 1")
    lost = await session.cell("import os; os.kill(-1, 9); os.abort()")
    assert (lost.status, lost.state_kept) == (Status.STATE_LOST, False)
    assert "all variables of this session are lost" in lost.text()
    assert (await session.cell("y = 2\ny")).stdout == "2\n"


async def test_nothing_a_cell_started_goes_on(session: Session) -> None:
    result = await session.cell(
        "import subprocess, threading, time\nn = 0\n"
        "def count():\n    global n\n    while True: n += 1; time.sleep(0.01)\n"
        "threading.Thread(target=count, daemon=True).start()\n"
        "[subprocess.Popen(['sleep', '60'], start_new_session=True) for _ in range(3)]; time.sleep(0.05)"
    )
    assert (result.ok, result.stopped) == (True, 3) and "3 processes" in result.text()
    before = await session.cell("n")
    await asyncio.sleep(0.2)
    assert int((await session.cell("n")).stdout) - int(before.stdout) < 8  # 20 if the thread had gone on


async def test_programs_and_commands(session: Session) -> None:
    program = await session.run("import sys\nprint(sys.stdin.read()[::-1], __name__, sys.argv)\nsys.exit(3)", "olleh")
    assert (program.status, program.exit_code, program.stdout) == (Status.EXIT, 3, "hello __main__ ['main.py']\n")
    command = await session.bash("echo $0 >&2; cat; false", "in")
    assert (command.status, command.exit_code, command.stdout, command.stderr) == (Status.EXIT, 1, "in", "bash\n")
    killed = await session.bash("kill -SEGV $$")
    assert (killed.status, killed.signal) == (Status.CRASHED, 11)
    busy = await session.run("while True: pass", wall=0.3)
    assert (busy.status, busy.detail, busy.rolled_back) == (Status.TIMEOUT, "wall", False)
    raised = await session.run("{}['k']")
    assert (raised.status, raised.detail) == (Status.EXCEPTION, "KeyError")


async def test_cpu_seconds_are_counted_in_programs_and_in_cells(sandbox: Sandbox) -> None:
    session = await sandbox.session(cpu=0.5, wall=8.0)
    program = await session.run("while True: pass")
    cell = await session.cell("while True: pass")
    assert [(r.status, r.detail) for r in (program, cell)] == [(Status.TIMEOUT, "cpu")] * 2
    assert max(program.seconds, cell.seconds) < 8 and "0.5 s of CPU time" in cell.text()


async def test_memory_of_processes_together_is_watched(sandbox: Sandbox) -> None:
    session = await sandbox.session(memory_mb=100, wall=5.0)
    code = "import os\n[os.fork() for _ in range(2)]\nb = b'x' * (60 << 20)\nimport time; time.sleep(3)"
    assert (await session.run(code)).status is Status.MEMORY


async def test_shared_memory_counts(sandbox: Sandbox) -> None:
    session = await sandbox.session(memory_mb=100, wall=5.0)
    code = (
        "import mmap, os, time\n[os.fork() for _ in range(2)]\nm = mmap.mmap(-1, 60 << 20)\n"
        "m.write(b'x' * (60 << 20))\ntime.sleep(3)"
    )
    assert (await session.run(code)).status is (await session.cell(code)).status is Status.MEMORY
    denied = await session.bash("python3 -S -c 'import os; os.memfd_create(\"x\")'", "in")
    assert "PermissionError" in denied.stderr
    assert (await session.run("print(input())", "in")).stdout == "in\n"  # its own memfd for that is no attack


def test_an_unknown_machine_has_no_filter_and_no_sandbox() -> None:
    with pytest.raises(OSError, match="filter for riscv64"):
        inside("seccomp").build(machine="riscv64")


async def test_memory_that_a_checkpoint_shares_counts_once(sandbox: Sandbox) -> None:
    session = await sandbox.session(memory_mb=200)
    assert (await session.cell("b = b'x' * (120 << 20)")).ok
    assert (await session.cell("import time; time.sleep(0.4); len(b) >> 20")).stdout == "120\n"


async def test_output_is_capped_in_the_middle_and_always_text(sandbox: Sandbox) -> None:
    session = await sandbox.session(output_kb=1)
    result = await session.cell("print('a' * 5000 + 'z' * 5000)")
    assert result.truncated and result.stdout.startswith("a" * 512) and result.stdout.endswith("z" * 511 + "\n")
    assert "[... 8977 bytes left out ...]" in result.stdout
    code = r"import sys; print('\ud800\0\x1b[2J'); sys.stdout.flush(); sys.stdout.buffer.write(b'\xff'); None"
    odd = await session.cell(code)
    assert odd.stdout == "\\ud800\0\x1b[2J\n\ufffd"


async def test_files_never_follow_links(session: Session) -> None:
    await session.write("data/a.txt", "hello")
    await session.cell("import os; os.symlink('/etc/passwd', 'l'); os.symlink('/etc', 'd'); os.mkfifo('p')")
    assert [(e.path, e.kind) for e in await session.list()] == [
        ("d", "link"), ("data", "folder"), ("data/a.txt", "file"), ("l", "link"), ("p", "other"),
    ]  # fmt: skip
    assert await session.read("data/a.txt") == b"hello"
    for path in ("l", "d/passwd", "../etc/passwd", "/etc/passwd", "p", "data", "missing", "a\0b", ""):
        with pytest.raises(UsageError):
            await session.read(path)
    with pytest.raises(UsageError):
        await session.write("d/x", "")
    with pytest.raises(UsageError, match=r"[Nn]o space|too large"):
        await session.write("big", bytes(63 << 20))
        await session.write("big2", bytes(63 << 20))
    await session.write("l", "mine")  # replaces the link
    assert (await session.cell("open('l').read()")).stdout == "'mine'\n"


async def test_a_closed_folder_does_not_end_the_list(session: Session) -> None:
    await session.cell("import os; os.mkdir('shut'); open('shut/x', 'w'); open('z', 'w'); os.chmod('shut', 0)")
    assert [(e.path, e.kind) for e in await session.list()] == [("shut", "folder"), ("z", "file")]
    await session.cell("os.chmod('.', 0)")
    assert await session.list() == ()


@pytest.mark.parametrize("code", ["1 +", "def f(:", "if x:\ny", "import json; json.loads('{')", "eval('1 +')"])
async def test_a_traceback_says_nothing_of_the_host(session: Session, code: str) -> None:
    for result in (await session.cell(code), await session.run(code)):
        assert result.status is Status.EXCEPTION and f'"{sys.base_prefix}/' not in result.text().replace('"/usr/', "")
        assert ("json/decoder.py" in result.stderr) == ("json" in code) and "worker" not in result.stderr
        assert ("Traceback" in result.stderr) == ("json" in code or "eval" in code)
        assert "ast.py" not in result.stderr


async def test_the_environment_holds_nothing_of_ours(session: Session) -> None:
    os.environ["SECRET_OF_THE_HOST"] = "canary-in-the-environment"
    code = (
        "import glob\nfor f in glob.glob('/proc/*/environ'):\n"
        "    try: print(open(f, 'rb').read())\n    except OSError: 0"
    )
    try:
        seen = await session.run(code)
    finally:
        del os.environ["SECRET_OF_THE_HOST"]
    names = await session.cell("import os; sorted(os.environ), os.listdir('/root')")
    assert "canary" not in seen.stdout + names.stdout and "HOME" in names.stdout
    assert str(Path.cwd()) not in seen.stdout + names.stdout


async def test_many_sessions_at_once(sandbox: Sandbox) -> None:
    sessions = [await sandbox.session() for _ in range(24)]
    await asyncio.gather(*(s.cell(f"x = {n}") for n, s in enumerate(sessions)))
    results = await asyncio.gather(*(s.cell("x") for s in sessions))
    assert [r.stdout for r in results] == [f"{n}\n" for n in range(24)]
    assert sandbox.counts == {Status.OK: 48}


async def test_going_back_to_an_earlier_cell(sandbox: Sandbox) -> None:
    for keep in (3, 0):
        session = await sandbox.session(keep=keep)
        for number in range(1, 5):
            await session.cell(f"x = {number}")
        assert await session.back(3) == ()
        assert (await session.cell("x")).stdout == "2\n" and session.cells == 3
        with pytest.raises(UsageError, match="no call 9"):
            await session.back(9)


async def test_a_replayed_call_that_differs_is_named(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    calls = [("cell", "x = 1\nx", "1"), ("cell", "x + 1", "3"), ("bash", "echo hi", "hi")]
    assert [(d.call, d.recorded, d.now) for d in await session.replay(calls)] == [(2, "3", "2")]


async def test_a_lost_box_is_rebuilt_and_a_second_loss_is_a_fault(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    await session.cell("x = 41")
    (runner,) = sandbox._runners[()]
    runner.process.kill()
    await asyncio.sleep(0.1)
    assert (await session.cell("x + 1")).stdout == "42\n"
    assert sandbox.counts[Status.SANDBOX_RESTARTED] == 1
    await session.close()
    with pytest.raises(SandboxFault):
        await session.cell("x")


async def test_a_runner_that_is_stuck_is_replaced(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    await session.cell("x = 41")
    (stuck,) = sandbox._runners[()]
    for pid in (stuck.process.pid, *_descendants(stuck.process.pid)):
        os.kill(pid, signal.SIGSTOP)
    assert (await session.cell("x + 1", wall=0.2)).stdout == "42\n"
    (runner,) = sandbox._runners[()]
    assert runner is not stuck and stuck.process.poll() is not None and not stuck.alive
    assert sandbox.counts[Status.SANDBOX_RESTARTED] == 1


async def test_a_rebuilt_session_that_differs_is_a_fault(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    await session.cell("import os; os.urandom(8).hex()")
    sandbox._runners[()][0].process.kill()
    await asyncio.sleep(0.1)
    with pytest.raises(SandboxFault, match="call 1 gave"):
        await session.cell("1")


async def test_a_sandbox_that_starts_no_more_is_a_fault(sandbox: Sandbox) -> None:
    session = await sandbox.session(imports=("no_such_package",))
    with pytest.raises(MissingDependency):  # what the user asked for
        await session.cell("1")
    for runner in sandbox._runners[()]:
        await runner.close()
    session, sandbox.level = await sandbox.session(), "nothing"
    with pytest.raises(SandboxFault, match="No sandbox could be started"):
        await session.cell("1")
    assert sandbox.counts[Status.SANDBOX_UNAVAILABLE] == 2


async def test_waiting_for_a_place_is_no_timeout_of_the_tool(sandbox: Sandbox) -> None:
    contexts = [ToolContext(session_factory=sandbox.session) for _ in range(6)]
    code = {"code": "import time; time.sleep(0.4)"}
    results = await asyncio.gather(*(run_python.call(context, code, timeout=0.5) for context in contexts))
    assert [result.error for result in results] == [None] * 6  # four places: two of them had to wait
    await asyncio.gather(*(context.close() for context in contexts))


async def test_closing_leaves_no_process(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    running = asyncio.ensure_future(session.bash("sleep 987654"))
    await asyncio.sleep(0.2)
    assert _running("987654")
    await session.close()
    with pytest.raises(SandboxFault):
        await running
    for _ in range(100):
        if not _running("987654"):
            break
        await asyncio.sleep(0.02)
    assert not _running("987654")


def _running(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode("utf-8", "replace"))
        except OSError:
            continue
    return [line for line in found if word in line and "pytest" not in line]


async def test_many_executions_in_a_row_leave_nothing(sandbox: Sandbox) -> None:
    session = await sandbox.session()

    async def batch() -> None:
        for _ in range(30):
            assert (await sandbox.run("print(1)")).ok
            assert (await session.cell("x = 1")).ok
            assert (await session.run("pass")).ok

    def counts() -> tuple[int, int, int]:
        (runner,) = sandbox._runners[()]
        jail = [pid for pid in _descendants(runner.process.pid) if Path(f"/proc/{pid}").exists()]
        open_there = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in jail)
        return len(os.listdir("/proc/self/fd")), len(jail), open_there

    await batch()
    await asyncio.sleep(0.1)
    before = counts()
    await batch()
    await asyncio.sleep(0.1)
    assert counts() == before


def _descendants(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [deeper for child in found for deeper in _descendants(child)]


async def test_packages_are_there_where_they_are_asked_for(sandbox: Sandbox) -> None:
    plain, numeric = await sandbox.session(), await sandbox.session(imports=("numpy",))
    assert (await plain.cell("import numpy")).detail == "ModuleNotFoundError"
    assert (await numeric.cell("import numpy as np, numpy.polynomial; int(np.arange(5).sum())")).stdout == "10\n"
    assert (await numeric.bash("ls /opt/packages")).stdout == "numpy\nnumpy.libs\n"


async def test_a_weaker_level_is_an_error_and_never_a_fallback() -> None:
    with pytest.raises(SandboxUnavailable, match="weaker than") as caught:
        await Sandbox.open(SandboxConfig(backend="bare", min_level="ns"))
    assert "min_level: bare" in caught.value.hint
    with pytest.raises(ConfigError):
        await Sandbox.open(SandboxConfig(backend="nothing"))


async def test_an_unknown_limit_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="memory"):
        await sandbox.session(memory=5)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "2\n"), ("x = 2", ""), ("x = 1; x", "1\n"), ("print(3)", "3\n"), ("print(3) or 4", "3\n4\n"),
        ("[\n1,\n2\n]", "[1, 2]\n"), ("for i in 'a':\n    i", ""), ("'''a\nprint(1)'''", "'a\\nprint(1)'\n"),
        ("None", ""), ("", ""), ("# only a comment", ""), ("d = {}\nd['k'] = 1\nd == {'k': 1}", "True\n"),
    ],
)  # fmt: skip
async def test_a_last_expression_is_shown(session: Session, code: str, shown: str) -> None:
    result = await session.cell(code)
    assert (result.status, result.stdout) == (Status.OK, shown)


def test_the_command_runs_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl_cli.commands import main

    program = tmp_path / "program.py"
    program.write_text("print('hello')\nraise SystemExit(3)")
    assert main(["sandbox", "run", str(program)]) == 1
    output = capsys.readouterr()
    assert output.out == "hello\n[exited with code 3]\n" and "at level ns" in output.err
    assert main(["sandbox", "run", str(tmp_path / "missing.py")]) == 2
    assert main(["sandbox", "attack", "--level", "bare"]) == 2
    assert main(["sandbox", "attack", "--only", "odd-bytes"]) == 0
    assert "contained" in capsys.readouterr().out
