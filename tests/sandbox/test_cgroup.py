"""Cgroups of version 2, against its files and, where one can be mounted, the kernel's own; and why no level starts."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_cli.sandbox import Status, cgroup, grade, launch, owner
from agentrl_cli.sandbox.cgroup import Cgroup, set_limit
from tests.helpers.processes import comes
from tests.helpers.sandbox import open_sandbox

FILES = {
    "cgroup.procs": "", "cgroup.subtree_control": "", "memory.max": "max\n", "memory.swap.max": "max\n",
    "memory.current": "0\n", "pids.max": "max\n", "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n",
}  # fmt: skip


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that behaves as a cgroup of version 2 does: files come with mkdir, go with rmdir, processes keep it."""
    # Replaced because the kernel makes and removes these files, and a machine with version 2 is not always to be had.
    mkdir, rmdir = Path.mkdir, Path.rmdir

    def made(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(self, mode, parents, exist_ok)
        if self.is_relative_to(tmp_path):
            for name, text in FILES.items():
                (self / name).write_text(text)

    def removed(self: Path) -> None:
        if self.is_relative_to(tmp_path):
            if (
                any(entry.is_dir() for entry in self.iterdir())
                or (self / "cgroup.procs").read_text()
            ):
                raise OSError(16, "busy")
            for name in FILES:
                (self / name).unlink()
        rmdir(self)

    monkeypatch.setattr(Path, "mkdir", made)
    monkeypatch.setattr(Path, "rmdir", removed)
    (tmp_path / "top").mkdir()
    return tmp_path / "top"


def test_version_two_limits_a_runner_and_its_boxes(parent: Path) -> None:
    group = cgroup._make(parent, "agentrl-runner-1", 300 << 20)
    assert group is not None
    group.tasks = cgroup._bound_tasks(group.folder, 77)
    assert group.tasks is None and group.bounded
    names = ("memory.max", "memory.swap.max", "pids.max", "cgroup.subtree_control")
    assert _read(group.folder, *names) == [str(300 << 20), "0", "77", "+memory"]
    runner = group.folder / "runner"
    assert str(runner / "cgroup.procs") in group.command(["true"])[2]
    assert _read(runner, "memory.max") == ["max\n"]  # what is held is all of it together

    first, second = group.take(64 << 20), group.take(80 << 20)
    assert first is not None and second is not None and first != second
    assert _read(first, "memory.max", "memory.swap.max") == [str(64 << 20), "0"]
    set_limit(first, 96 << 20)
    assert _read(first, "memory.max") == [str(96 << 20)]
    with Cgroup.files(first) as fds, Cgroup.files(None) as none:
        opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
        os.write(fds[0], b"0")
    assert opened == [str(first / "cgroup.procs"), str(first / "memory.events")] and none == []
    assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds)

    group.give(first)
    for left in ("0", ""):  # a process of the earlier box is still there, then it has ended
        (first / "cgroup.procs").write_text(left)
        assert group.take(64 << 20) and first.exists() is bool(left)
    group.remove()
    assert not group.folder.exists()


def _read(folder: Path, *names: str) -> list[str]:
    return [(folder / name).read_text() for name in names]


def _dead_owner() -> str:
    with subprocess.Popen(["sleep", "3600"]) as left:
        name = f"{left.pid}-{owner.born(str(left.pid))}-{owner.name().split('-')[2]}"
        left.kill()
    return name


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """The kernel's own version 2, seen by this process alone, so that no mount is left whatever happens."""
    folder = tmp_path / "v2"
    folder.mkdir()
    mount = ["mount", "-t", "cgroup2", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("cgroup2 cannot be mounted here")
    fd = os.open(folder, os.O_DIRECTORY)
    subprocess.run(["umount", "-l", str(folder)], check=True)
    top = Path(f"/proc/{os.getpid()}/fd/{fd}/agentrl-test-{os.getpid()}")
    try:
        top.mkdir()
    except OSError:
        os.close(fd)
        pytest.skip("no cgroup of version 2 can be made here")
    yield top
    for below, folders, _ in os.walk(top, topdown=False):
        for name in folders:
            os.rmdir(Path(below, name))
    top.rmdir()
    os.close(fd)


def test_processes_join_and_are_ended_in_the_kernels_version_two(mounted: Path) -> None:
    group = Cgroup(mounted / f"agentrl-runner-{_dead_owner()}-1")
    (group.folder / "runner").mkdir(parents=True)
    (box := group.folder / "box1").mkdir()
    runner = subprocess.Popen(group.command(["sleep", "3600"]))
    joiner = "import os, sys, time; os.write(int(sys.argv[1]), b'0'); print(flush=True); time.sleep(3600)"
    with Cgroup.files(box) as fds:
        inside = subprocess.Popen(
            ["python3", "-c", joiner, str(fds[0])], pass_fds=fds, stdout=subprocess.PIPE
        )
    with runner, inside:
        assert inside.stdout is not None and inside.stdout.readline() == b"\n"
        assert comes(lambda: bool((group.folder / "runner" / "cgroup.procs").read_text()))
        assert _read(group.folder / "runner", "cgroup.procs") == [f"{runner.pid}\n"]
        assert _read(box, "cgroup.procs") == [f"{inside.pid}\n"]
        assert not cgroup._delete(group.folder)  # as long as something runs there
        assert cgroup.sweep(mounted) == 1
        assert runner.wait() == inside.wait() == -signal.SIGKILL
    assert not group.folder.exists()


def test_without_the_memory_controller_no_cgroup_is_made_and_none_left(mounted: Path) -> None:
    for place in (mounted / "missing", mounted):  # to the second nothing passes the controller on
        assert cgroup._make(place, "agentrl-runner-1", 1 << 28) is None
    assert [entry for entry in mounted.iterdir() if entry.is_dir()] == []


ALONE = "PermissionError: [Errno 1] "


# What the runner really writes under `unshare -r`.
STDERR = {
    "ns": f'  File "/opt/agentrl/sandbox/isolation/libc.py", in check\n{ALONE}mount /proc: Operation not permitted',
    "landlock": f"    os.setgroups([])\n{ALONE}Operation not permitted",
    "bare": f"    os.setgroups([])\n{ALONE}Operation not permitted",
}


@pytest.mark.parametrize("level", STDERR)
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's runner becomes no other user")
def test_a_namespace_of_root_alone_is_named(level: str, tmp_path: Path) -> None:
    one, every = tmp_path / "one", tmp_path / "all"
    one.write_text("         0       1000          1\n")
    every.write_text("         0          0 4294967295\n")
    said = launch.explain(level, STDERR[level], one)
    assert "`unshare -r`" in said and "Start agentrl outside of it" in said
    for stderr, ids in (
        (STDERR[level], every),
        (STDERR[level], tmp_path / "missing"),
        ("ModuleNotFoundError: sandbox", one),
    ):
        assert "unshare -r" not in launch.explain(level, stderr, ids)


OTHERS = 2


COMPUTE = "import time\nwhile time.process_time() < {seconds}: pass\n"


def counts_waiting() -> bool:
    """Whether the kernel counts how long a thread waits for a processor."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) > 0
    except (OSError, ValueError, IndexError):
        return False


@pytest.fixture
def busy() -> Iterator[None]:
    """One processor for this process, what it starts, and programs that want all of it."""
    if not hasattr(os, "sched_setaffinity") or not counts_waiting():
        pytest.skip("the kernel does not count how long a thread waits for a processor")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(OTHERS)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.wait()


async def test_only_what_others_take_of_the_processor_does_not_count(busy: None) -> None:
    """Each computes for less CPU time than its wall limit, and takes longer than that limit by the clock."""
    async with await open_sandbox(workers=1, wall=0.5, cpu=5.0) as sandbox:
        session = await sandbox.session()
        program = COMPUTE.format(seconds=0.3) + "print('done')"
        # A session's process has used CPU time before.
        spent = (
            "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
        )
        cell = f"x = 1\n{spent}\nprint('done')"
        for result in (await session.run(program), await session.cell(cell)):
            assert (result.status, result.stdout) == (Status.OK, "done\n"), result
        assert (await session.cell("print(x)")).stdout == "1\n"
        slow = "import time\ndef f(n):\n    end = time.process_time() + 0.3\n"
        slow += "    while time.process_time() < end: pass\n    return n"
        assert (await grade(session, slow, [{"call": "f", "args": [1], "expect": 1}])).passed == 1
        slow = COMPUTE.format(seconds=0.3) + "print(input())"
        assert (await grade(session, slow, [{"stdin": "1\n", "stdout": "1\n"}])).passed == 1
        for code in ("import time\ntime.sleep(3600)", "while True: pass"):
            result = await session.run(code, wall=0.3)
            assert result.status is Status.TIMEOUT, result
