"""Rollback: a session's variables and files after a failed cell, and before an earlier call."""

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
