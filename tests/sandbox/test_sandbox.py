"""Executions, sessions, rollback, files, limits: each result by its name, and the next execution right."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.sandbox import Session, Status
from agentrl_cli.sandbox.channel import guest_module
from tests.helpers.cli import Cli
from tests.helpers.sandbox import open_sandbox


async def test_cells_share_variables_and_imports(session: Session) -> None:
    first = await session.cell("import math\nx = 6")
    second = await session.cell("print(math.sqrt(x * 6))\nx + 1")
    assert first.text() == "[no output]"
    assert (second.text(), second.level) == ("6.0\n7", session.sandbox.level)


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (
            "x = 2\nwhile True: pass",
            Status.TIMEOUT,
            "timed out after 0.4 s; variables from this cell were discarded",
        ),
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


async def test_killing_the_checkpoint_is_reported(session: Session) -> None:
    await session.cell("x = 1")
    lost = await session.cell("import os; os.kill(-1, 9); os.abort()")
    assert (lost.status, lost.state_kept) == (Status.STATE_LOST, False)
    assert "all variables of this session are lost" in lost.text()
    assert (await session.cell("y = 2\ny")).stdout == "2\n"


async def test_threads_and_processes_of_a_cell_end_with_it(session: Session) -> None:
    result = await session.cell(
        "import subprocess, threading, time\nn = 0\n"
        "def count():\n    global n\n    while True: n += 1; time.sleep(0.01)\n"
        "threading.Thread(target=count, daemon=True).start()\n"
        "[subprocess.Popen(['sleep', '60'], start_new_session=True) for _ in range(3)]; time.sleep(0.05)"
    )
    assert (result.ok, result.stopped) == (True, 3) and "3 processes" in result.text()
    before = int((await session.cell("n")).stdout)
    await asyncio.sleep(2.0)
    # 200 if the thread had continued
    assert int((await session.cell("n")).stdout) - before < 80


@pytest.mark.parametrize(
    ("op", "code", "given", "result"),
    [
        (
            "run",
            "import sys\nprint(sys.stdin.read()[::-1], __name__, sys.argv)\nsys.exit(3)",
            "olleh",
            {"status": Status.EXIT, "exit_code": 3, "stdout": "hello __main__ ['main.py']\n"},
        ),
        (
            "bash",
            "echo $0 >&2; cat; false",
            "in",
            {"status": Status.EXIT, "exit_code": 1, "stdout": "in", "stderr": "bash\n"},
        ),
        ("bash", "kill -SEGV $$", "", {"status": Status.CRASHED, "signal": 11}),
        (
            "run",
            "while True: pass",
            "",
            {"status": Status.TIMEOUT, "detail": "wall", "rolled_back": False},
        ),
        ("run", "{}['k']", "", {"status": Status.EXCEPTION, "detail": "KeyError"}),
    ],
)
async def test_programs_and_commands(
    session: Session, op: str, code: str, given: str, result: dict[str, Any]
) -> None:
    wall = 0.3 if "while" in code else None
    found = await getattr(session, op)(code, given, wall=wall)
    assert {name: getattr(found, name) for name in result} == result


def test_an_unknown_machine_has_no_filter_and_no_sandbox() -> None:
    with pytest.raises(OSError, match="filter for riscv64"):
        guest_module("isolation/seccomp").build(machine="riscv64")


async def test_files_never_follow_links(session: Session) -> None:
    await session.write("data/a.txt", "hello")
    await session.cell(
        "import os; os.symlink('/etc/passwd', 'l'); os.symlink('/etc', 'd'); os.mkfifo('p')"
    )
    assert [(e.path, e.kind) for e in await session.list()] == [
        ("d", "link"), ("data", "folder"), ("data/a.txt", "file"), ("l", "link"), ("p", "other"),
    ]  # fmt: skip
    assert await session.read("data/a.txt") == b"hello"
    for path in (*"l d/passwd ../etc/passwd /etc/passwd p data missing a\0b".split(), ""):
        with pytest.raises(UsageError):
            await session.read(path)
    with pytest.raises(UsageError):
        await session.write("d/x", "")
    with pytest.raises(UsageError, match=r"[Nn]o space|too large"):
        for name in ("big", "big2"):
            await session.write(name, bytes(63 << 20))
    await session.write("l", "mine")  # replaces the link
    assert (await session.cell("open('l').read()")).stdout == "'mine'\n"


async def test_a_closed_folder_does_not_end_the_list(session: Session) -> None:
    await session.cell(
        "import os; os.mkdir('shut'); open('shut/x', 'w'); open('z', 'w'); os.chmod('shut', 0)"
    )
    assert [(e.path, e.kind) for e in await session.list()] == [("shut", "folder"), ("z", "file")]
    await session.cell("os.chmod('.', 0)")
    assert await session.list() == ()


@pytest.mark.parametrize("op", ["cell", "run"])
async def test_a_traceback_hides_the_host(session: Session, op: str) -> None:
    for code in ("1 +", "def f(:", "if x:\ny", "import json; json.loads('{')", "eval('1 +')"):
        result = await getattr(session, op)(code)
        text = result.text().replace('"/usr/', "")
        assert result.status is Status.EXCEPTION and f'"{sys.base_prefix}/' not in text
        assert "worker" not in result.stderr and "ast.py" not in result.stderr
        assert ("json/decoder.py" in result.stderr) == ("json" in code)
        assert ("Traceback" in result.stderr) == ("json" in code or "eval" in code)


async def test_a_call_that_differs_when_it_is_run_again_is_named(session: Session) -> None:
    await session.cell("x = 1\nx")
    await session.bash("head -c 16 /dev/urandom | od")
    await session.cell("x + 1")
    (diverged,) = await session.back(3)  # not kept: the first two are run again
    assert (diverged.call, diverged.recorded[:4]) == (2, "ok: ")
    assert diverged.recorded != diverged.now
    assert (await session.cell("x + 1")).stdout == "2\n"


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


def test_the_command_runs_a_program(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "program.py").write_text("print('hello')\nraise SystemExit(3)")
    shown = cli("sandbox", "run", "program.py", code=1, said="at level ns")
    assert shown == "hello\n[exited with code 3]\n"
    cli("sandbox", "run", "missing.py", code=2)


FORKS = """
import os, time
made = []
try:
    while len(made) < 40:
        if not (pid := os.fork()):
            time.sleep(9)
        made.append(pid)
except BlockingIOError:
    print(len(made))
for pid in made:
    os.kill(pid, 9)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("level", ["landlock", "ns"])
async def test_a_runner_started_by_root_becomes_another_user(level: str) -> None:
    async with await open_sandbox(
        backend=level, min_level="landlock", workers=1, processes=8
    ) as sandbox:
        who = await sandbox.run(
            "import os; print(0 in os.getresuid() + os.getresgid(), os.getgroups() in ([], [65534]))"
        )
        assert who.stdout == "False True\n", who.text()
        # So the kernel, which exempts root, bounds the number of its processes.
        made = await sandbox.run(FORKS)
        assert 0 < int(made.stdout) < 12, made.text()
