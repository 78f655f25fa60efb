"""Executions, sessions, rollback, files, limits: each result by its name, and the next execution right."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.sandbox import Sandbox, Session, Status
from agentrl_cli.sandbox.channel import guest_module
from tests.helpers.cli import Cli
from tests.helpers.sandbox import open_sandbox


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
    assert result.text() == (shown.rstrip("\n") or "[no output]")


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


# --- rollback: a session's variables and files after a failed cell, and before an earlier call ---

# Checkpoints are made alike at both levels; what they hold differs.
both = pytest.mark.parametrize("sandbox", ["ns", "landlock"], indirect=True)


MAKE = """
import os
os.makedirs('d/e'); open('d/e/a', 'w').write('one'); open('b', 'w').write('two'); os.chmod('b', 0o750)
os.symlink('b', 'link'); os.link('b', 'other name'); os.mkfifo('pipe'); os.utime('d/e/a', ns=(5, 7)); os.mkdir('shut')
"""
SPOIL = """
import shutil
open('d/e/a', 'a').write('!'); open('new', 'w'); os.remove('b'); os.remove('link'); os.symlink('/etc', 'link')
os.remove('pipe'); open('pipe', 'w'); os.makedirs('x/y'); open('x/y/z', 'w'); os.chmod('shut', 0); os.chmod('d', 0)
x = 2
"""
LOOK = """
def look():
    found = []
    for folder, names, files in os.walk('.'):
        for name in sorted([*names, *files]):
            path = os.path.join(folder, name); info = os.lstat(path)
            what = os.readlink(path) if os.path.islink(path) else open(path).read() if os.path.isfile(path) else ''
            times = info.st_mtime_ns if os.path.isfile(path) else 0
            found.append((path, oct(info.st_mode), info.st_nlink if os.path.isfile(path) else 0, what, times))
    return sorted(found)
"""


@both
@pytest.mark.parametrize(
    ("end", "status"), [("os.abort()", Status.CRASHED), ("os._exit(0)", Status.OK)]
)
async def test_a_cell_that_ends_badly_leaves_variables_and_files_as_they_were(
    session: Session, end: str, status: Status
) -> None:
    await session.cell("x = 1" + MAKE + LOOK)
    before = (await session.cell("look()")).stdout
    assert "'one', 7" in before and before.count("0o100750', 2, 'two'") == 2
    said = "variables and files from this cell were discarded, earlier ones are kept"
    for _ in range(2):
        result = await session.cell(SPOIL + end)
        assert (result.status, result.rolled_back, result.files) == (status, True, "restored")
        assert status is Status.OK or said in result.text()
        assert (await session.cell("look()")).stdout == before
    assert (await session.cell("x")).stdout == "1\n"


async def test_unchanged_files_are_not_mentioned(session: Session) -> None:
    await session.cell("open('a', 'w').write('one')")
    crashed = await session.cell("import os; os.abort()")
    said = "; variables from this cell were discarded, earlier"
    assert crashed.files == "" and said in crashed.text()
    raised = await session.cell("x = 1; open('a', 'w').write('two'); y = x / 0")
    assert (raised.rolled_back, raised.files) == (False, "")
    assert raised.text().startswith("Traceback") and "y = x / 0" in raised.text()
    # An exception ends a cell as it would end it anywhere.
    assert await session.read("a") == b"two" and (await session.cell("x")).stdout == "1\n"


async def test_a_folder_that_cannot_be_kept_is_reported_as_left(sandbox: Sandbox) -> None:
    session = await sandbox.session(keep=3)
    holes = "import os\nfor n in 'abc':\n    with open(n, 'w') as f: f.truncate(40 << 20)"
    await session.cell(holes)
    crashed = await session.cell("open('new', 'w'); os.abort()")
    assert (crashed.files, crashed.state_kept) == ("left", True)
    assert "the files are as the cell left them" in crashed.text()
    assert [entry.path for entry in await session.list()] == ["a", "b", "c", "new"]
    await session.cell("os.remove('new')")
    assert await session.back(2) == ()  # by running the first call again
    assert [entry.path for entry in await session.list()] == ["a", "b", "c"]


@both
@pytest.mark.parametrize("keep", [8, 0])
async def test_a_rollback_restores_variables_and_files(sandbox: Sandbox, keep: int) -> None:
    session = await sandbox.session(keep=keep)
    await session.cell("x = 1\nopen('a', 'w').write('1')")  # call 1
    await session.bash("echo 2 > a; mkdir d; echo b > d/b")  # call 2
    await session.write("c", "3")  # call 3
    await session.cell("x = 4\nopen('a', 'w').write('4')")  # call 4
    await session.run("import shutil; shutil.rmtree('d')")  # call 5
    await session.cell("import os; x = 6; open('a', 'w'); os.abort()")  # call 6
    assert len(session.history) == 6
    for call, x, file, content in (
        (6, "4\n", "a", b"4"),
        (5, "4\n", "d/b", b"b\n"),
        (4, "1\n", "a", b"2\n"),
        (2, "1\n", "a", b"1"),
    ):
        assert await session.back(call) == ()
        assert [(await session.cell("x")).stdout, await session.read(file)] == [x, content]
    assert [e.path for e in await session.list()] == ["a"]
    assert (await session.cell("x += 1; x")).stdout == "2\n"
    assert await session.back(1) == () and await session.list() == ()
    assert (await session.cell("x")).detail == "NameError"
    with pytest.raises(UsageError, match="Call 2 does not exist: the session has made 1"):
        await session.back(2)


@pytest.mark.parametrize(("keep", "repeated"), [(3, []), (0, [1])])
async def test_a_rollback_to_a_checkpoint_repeats_no_call(
    sandbox: Sandbox, keep: int, repeated: list[int]
) -> None:
    session = await sandbox.session(keep=keep)
    first = (await session.cell("import os\nr = os.urandom(8).hex()\nr")).stdout
    await session.cell("open('a', 'w')")
    assert [one.call for one in await session.back(2)] == repeated
    assert ((await session.cell("r")).stdout == first) is not bool(repeated)


# All states but the one before this cell, without which the box would keep none.
OTHERS = """
import os, signal
others = sorted(int(name) for name in os.listdir('/proc') if name.isdecimal() and int(name) not in (1, os.getpid()))
for pid in others[:-1]:
    os.kill(pid, signal.SIGNAL)
x = 0
"""


# Elsewhere the code sees no other process.
@pytest.mark.parametrize("sandbox", ["ns"], indirect=True)
@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
async def test_a_checkpoint_that_the_code_ended_is_made_again(sandbox: Sandbox, end: str) -> None:
    session = await sandbox.session(keep=3)
    for code in ("x = 6", "y = 7", OTHERS.replace("SIGNAL", end)):
        assert (await session.cell(code)).ok
    assert await session.back(2) == ()
    assert (await session.cell("x * 7, 'y' in globals()")).stdout == "(42, False)\n"


async def test_kept_files_stay_within_the_limit_of_the_folder(sandbox: Sandbox) -> None:
    session = await sandbox.session(keep=9, disk_mb=8)
    for number in range(6):
        assert (await session.cell(f"open('a', 'w').write('{number}' * (3 << 20))")).ok
    for call, digit in ((6, b"4"), (2, b"0")):  # the earlier one is no longer kept: run again
        assert await session.back(call) == () and await session.read("a") == digit * (3 << 20)


async def test_restoring_files_follows_no_link(sandbox: Sandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("canary")
    for folder in (tmp_path, outside):
        folder.chmod(0o777)
    session = await sandbox.session(keep=3)
    await session.cell(
        "import os\nos.makedirs('d/e'); open('d/a', 'w').write('1'); open('d/e/a', 'w').write('2')"
    )
    swap = f"os.rename('d', 'old'); os.symlink({str(outside)!r}, 'd'); os.symlink({str(outside)!r}, 'old/e2')"
    swap += f"; os.rename('old/e', 'e'); os.symlink({str(outside)!r}, 'old/e')"
    assert (await session.cell(f"{swap}\nos.abort()")).files == "restored"
    assert [e.path for e in await session.list()] == ["d", "d/a", "d/e", "d/e/a"]
    assert (await session.cell(swap)).ok
    assert await session.back(3) == () and await session.read("d/e/a") == b"2"
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"a": "canary"}


async def test_a_deep_folder_does_not_end_the_box(session: Session) -> None:
    await session.cell("x = 1\nimport os")
    deep = await session.cell("for _ in range(300): os.mkdir('d'); os.chdir('d')\nos.abort()")
    assert (deep.status, deep.files, deep.state_kept) == (Status.CRASHED, "left", True)
    assert (await session.cell("x")).stdout == "1\n"


async def test_a_dropped_checkpoint_does_not_count_as_a_left_process(sandbox: Sandbox) -> None:
    session = await sandbox.session(keep=2)
    # From now on what still runs is looked for.
    await session.cell("import subprocess; subprocess.run(['true'])")
    results = [await session.cell(f"x = {number}") for number in range(20)]
    assert {(result.stopped, result.reason) for result in results} == {(0, "")}
    left = await session.cell("child = subprocess.Popen(['sleep', '60'])")
    assert left.stopped == 1 and "still running stopped" in left.reason


async def test_more_states_are_kept_than_processes_are_allowed(sandbox: Sandbox) -> None:
    session = await sandbox.session(keep=9, processes=4)
    results = [await session.cell(f"x = {number}") for number in range(12)]
    assert [result.text() for result in results if not result.ok] == []
    assert await session.back(5) == () and (await session.cell("x")).stdout == "3\n"
