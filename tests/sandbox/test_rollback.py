"""Rollback: a session's variables and files after a failed cell, and before an earlier call."""

import os
from pathlib import Path

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.sandbox import Sandbox, Session, Status

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
    before = await session.cell("look()")
    assert "'one', 7" in before.stdout and before.stdout.count("0o100750', 2, 'two'") == 2
    for _ in range(2):
        result = await session.cell(SPOIL + end)
        assert (result.status, result.rolled_back, result.files) == (status, True, "restored")
        if status is not Status.OK:
            assert (
                "variables and files from this cell were discarded, earlier ones are kept"
                in result.text()
            )
        assert (await session.cell("look()")).stdout == before.stdout
    assert (await session.cell("x")).stdout == "1\n"


async def test_unchanged_files_are_not_mentioned(session: Session) -> None:
    await session.cell("open('a', 'w').write('one')")
    crashed = await session.cell("import os; os.abort()")
    assert (
        crashed.files == ""
        and "; variables from this cell were discarded, earlier" in crashed.text()
    )
    raised = await session.cell("open('a', 'w').write('two'); 1 / 0")
    assert (raised.rolled_back, raised.files) == (False, "")
    assert await session.read("a") == b"two"  # an exception ends a cell as it would end it anywhere


async def test_a_folder_that_cannot_be_kept_is_reported_as_left(sandbox: Sandbox) -> None:
    session = await sandbox.session(keep=3)
    holes = "import os\nfor n in 'abc':\n    with open(n, 'w') as f: f.truncate(40 << 20)"
    await session.cell(holes)
    crashed = await session.cell("open('new', 'w'); os.abort()")
    assert (
        crashed.files == "left"
        and crashed.state_kept
        and "the files are as the cell left them" in crashed.text()
    )
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
    assert len(session.history) == 6 and session.cells == 3

    assert await session.back(6) == ()
    assert [(await session.cell("x")).stdout, await session.read("a")] == ["4\n", b"4"]
    assert await session.back(5) == ()
    assert [(await session.cell("x")).stdout, await session.read("d/b")] == ["4\n", b"b\n"]
    assert await session.back(4) == ()
    assert [(await session.cell("x")).stdout, await session.read("a")] == ["1\n", b"2\n"]
    assert await session.back(2) == ()
    assert [e.path for e in await session.list()] == ["a"] and await session.read("a") == b"1"
    assert (await session.cell("x += 1; x")).stdout == "2\n"
    assert await session.back(1) == () and await session.list() == ()
    assert (await session.cell("x")).detail == "NameError"
    with pytest.raises(UsageError, match="Call 2 does not exist: the session has made 1"):
        await session.back(2)


async def test_a_rollback_to_a_checkpoint_repeats_no_call(sandbox: Sandbox) -> None:
    for keep, same in ((3, True), (0, False)):
        session = await sandbox.session(keep=keep)
        first = (await session.cell("import os\nr = os.urandom(8).hex()\nr")).stdout
        await session.cell("open('a', 'w')")
        diverged = await session.back(2)
        again = (await session.cell("r")).stdout
        assert (again == first, [d.call for d in diverged]) == (same, [] if same else [1])


# All states but the one before this cell, without which the box would keep none.
OTHERS = """
import os, signal
others = sorted(int(name) for name in os.listdir('/proc') if name.isdecimal() and int(name) not in (1, os.getpid()))
for pid in others[:-1]:
    os.kill(pid, signal.SIGNAL)
x = 0
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
async def test_a_checkpoint_that_the_code_ended_is_made_again(sandbox: Sandbox, end: str) -> None:
    if sandbox.level != "ns":
        pytest.skip("elsewhere the code sees no other process")
    session = await sandbox.session(keep=3)
    await session.cell("x = 6")
    await session.cell("y = 7")
    assert (await session.cell(OTHERS.replace("SIGNAL", end))).ok
    assert await session.back(2) == ()
    assert (await session.cell("x * 7, 'y' in globals()")).stdout == "(42, False)\n"
    assert not any(name.startswith("sandbox_") for name in sandbox.counts), sandbox.counts


async def test_kept_files_stay_within_the_limit_of_the_folder(sandbox: Sandbox) -> None:
    session = await sandbox.session(keep=9, disk_mb=8)
    for number in range(6):
        assert (await session.cell(f"open('a', 'w').write('{number}' * (3 << 20))")).ok
    assert await session.back(6) == ()
    assert (await session.read("a"))[:1] == b"4" and len(await session.read("a")) == 3 << 20
    assert await session.back(2) == ()  # no longer kept: run again
    assert (await session.read("a"))[:1] == b"0"


async def test_restoring_files_follows_no_link(sandbox: Sandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("canary")
    os.chmod(tmp_path, 0o777)
    os.chmod(outside, 0o777)
    session = await sandbox.session(keep=3)
    await session.cell(
        "import os\nos.makedirs('d/e'); open('d/a', 'w').write('1'); open('d/e/a', 'w').write('2')"
    )
    swap = f"os.rename('d', 'old'); os.symlink({str(outside)!r}, 'd'); os.symlink({str(outside)!r}, 'old/e2')"
    swap += f"; os.rename('old/e', 'e'); os.symlink({str(outside)!r}, 'old/e')"
    assert (await session.cell(f"{swap}\nos.abort()")).files == "restored"
    assert [e.path for e in await session.list()] == ["d", "d/a", "d/e", "d/e/a"]
    assert (await session.cell(swap)).ok
    assert await session.back(3) == ()
    assert await session.read("d/e/a") == b"2"
    assert [path.name for path in outside.iterdir()] == ["a"] and (
        outside / "a"
    ).read_text() == "canary"


async def test_a_deep_folder_does_not_end_the_box(session: Session) -> None:
    await session.cell("x = 1\nimport os")
    deep = await session.cell("for _ in range(300): os.mkdir('d'); os.chdir('d')\nos.abort()")
    assert (deep.status, deep.files, deep.state_kept) == (Status.CRASHED, "left", True)
    assert (await session.cell("x")).stdout == "1\n"


async def test_a_dropped_checkpoint_does_not_count_as_a_left_process(sandbox: Sandbox) -> None:
    session = await sandbox.session(keep=2)
    await session.cell(
        "import subprocess; subprocess.run(['true'])"
    )  # from now on what still runs is looked for
    results = [await session.cell(f"x = {number}") for number in range(20)]
    assert {(result.stopped, result.reason) for result in results} == {(0, "")}
    left = await session.cell("child = subprocess.Popen(['sleep', '60'])")
    assert left.stopped == 1 and "still running stopped" in left.reason


async def test_more_states_are_kept_than_processes_are_allowed(sandbox: Sandbox) -> None:
    session = await sandbox.session(keep=9, processes=4)
    for number in range(12):
        result = await session.cell(f"x = {number}")
        assert result.ok, result.text()
    assert await session.back(5) == ()
    assert (await session.cell("x")).stdout == "3\n"
