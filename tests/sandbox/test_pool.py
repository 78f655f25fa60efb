"""The pool: many sessions, lost and stuck runners, levels, packages; what a run leaves that is killed."""

import asyncio
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl_cli.commands import main
from agentrl_cli.config import SandboxConfig
from agentrl_cli.errors import ConfigError, MissingDependency, SandboxFault, SandboxUnavailable
from agentrl_cli.sandbox import Sandbox, Status, cgroup, grade, launch, owner
from agentrl_cli.sandbox.cgroup import Cgroup, set_limit
from agentrl_cli.sandbox.channel import BoxLost, Channel, guest_module
from agentrl_cli.sandbox.pool import SPARES
from agentrl_cli.sandbox.runner_process import AT_ONCE, Process, Runner
from agentrl_cli.tools import ToolContext, as_tool
from agentrl_cli.tools.session import TOOL as run_python
from agentrl_cli.types import Outcome
from tests.helpers.cli import Cli
from tests.helpers.processes import alive, comes, commands, descendants, soon
from tests.helpers.sandbox import open_sandbox
from tests.helpers.train import TASK_YAML, episodes_of, start, trainer_of, write_pack


@pytest.fixture
async def own() -> AsyncIterator[Sandbox]:
    """A sandbox whose runner a test may end."""
    async with await open_sandbox(workers=1, wall=2.0) as opened:
        yield opened


async def test_many_sessions_at_once(sandbox: Sandbox) -> None:
    sessions = [await sandbox.session() for _ in range(24)]
    await asyncio.gather(*(s.cell(f"x = {n}") for n, s in enumerate(sessions)))
    results = await asyncio.gather(*(s.cell("x") for s in sessions))
    assert [r.stdout for r in results] == [f"{n}\n" for n in range(24)]
    assert sandbox.counts == {Status.OK: 48}


async def test_a_lost_box_is_rebuilt_and_a_second_loss_is_a_fault(own: Sandbox) -> None:
    session = await own.session(keep=3)
    for x, text in ((1, "1"), (41, "2")):
        await session.cell(f"x = {x}\nopen('a', 'w').write('{text}')")
    the_process(own).kill()
    await asyncio.sleep(0.1)
    assert (await session.cell("x + 1")).stdout == "42\n"
    assert own.counts[Status.SANDBOX_RESTARTED] == 1
    await session.back(2)
    assert [(await session.cell("x")).stdout, await session.read("a")] == ["1\n", b"1"]
    await session.close()
    with pytest.raises(SandboxFault):
        await session.cell("x")


async def test_a_runner_that_is_stuck_is_replaced(own: Sandbox) -> None:
    session = await own.session()
    await session.cell("x = 41")
    (stuck,) = own.pool.runners[()]
    process = the_process(own)
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGSTOP)
    assert (await session.cell("x + 1", wall=0.2)).stdout == "42\n"
    (runner,) = own.pool.runners[()]
    assert runner is not stuck and process.poll() is not None and not stuck.alive
    assert own.counts[Status.SANDBOX_RESTARTED] == 1


async def test_a_rebuilt_session_that_differs_is_a_fault(own: Sandbox) -> None:
    session = await own.session()
    await session.cell("import os; os.urandom(8).hex()")
    the_process(own).kill()
    await asyncio.sleep(0.1)
    with pytest.raises(SandboxFault, match="call 1 gave"):
        await session.cell("1")


async def test_a_sandbox_that_starts_no_more_is_a_fault(own: Sandbox) -> None:
    session = await own.session(imports=("no_such_package",))
    with pytest.raises(MissingDependency):  # what the user asked for
        await session.cell("1")
    for runner in own.pool.runners[()]:
        await runner.close()
    session, own.pool.level = await own.session(), "nothing"
    with pytest.raises(SandboxFault, match="No sandbox could be started"):
        await session.cell("1")
    assert own.counts[Status.SANDBOX_UNAVAILABLE] == 2


async def test_a_process_without_descriptors_is_a_fault_and_no_observation(
    own: Sandbox,
) -> None:
    session = await own.session(disk_mb=32)  # for which no spare box is ready
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(SandboxFault, match=r"host_resources.*no box could be opened"):
            await session.run("print(1)")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (await session.run("print(1)")).stdout == "1\n"


async def test_a_session_that_is_closed_while_its_box_opens_leaves_none(sandbox: Sandbox) -> None:
    session = await sandbox.session(disk_mb=32)
    running = asyncio.ensure_future(session.run("print(1)"))
    await asyncio.sleep(0)
    await session.close()
    with pytest.raises(SandboxFault, match="closed"):
        await running
    assert await soon(lambda: not any(runner.busy for runner in sandbox.pool.runners[()]))


async def test_waiting_for_a_slot_does_not_count_as_a_timeout(sandbox: Sandbox) -> None:
    contexts = [ToolContext(session_factory=sandbox.session) for _ in range(6)]
    code = {"code": "import time; time.sleep(1.6)"}
    results = await asyncio.gather(
        *(run_python.call(context, code, timeout=3.0) for context in contexts)
    )
    assert [result.error for result in results] == [
        None
    ] * 6  # four places: two of them had to wait
    await asyncio.gather(*(context.close() for context in contexts))


async def test_closing_leaves_no_process(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    running = asyncio.ensure_future(session.bash("sleep 987654"))
    assert await soon(lambda: bool(commands("987654")))
    await session.close()
    with pytest.raises(SandboxFault):
        await running
    assert await soon(lambda: not commands("987654"))


async def test_many_executions_in_a_row_leave_nothing(sandbox: Sandbox) -> None:
    session = await sandbox.session()

    async def counts() -> tuple[int, int, int]:
        for _ in range(30):
            for result in (
                await sandbox.run("print(1)"),
                await session.cell("x = 1"),
                await session.run("pass"),
            ):
                assert result.ok
        await stocked(sandbox)
        await asyncio.sleep(0.1)
        jail = [pid for pid in descendants(the_process(sandbox).pid) if alive(pid)]
        open_there = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in jail)
        return len(os.listdir("/proc/self/fd")), len(jail), open_there

    before = await counts()
    assert await counts() == before


async def test_a_weaker_level_is_an_error_and_never_a_fallback() -> None:
    with pytest.raises(SandboxUnavailable, match="weaker than") as caught:
        await Sandbox.open(SandboxConfig(backend="bare", min_level="ns"))
    assert "min_level: bare" in caught.value.hint


def the_process(sandbox: Sandbox) -> subprocess.Popen[bytes]:
    (runner,) = sandbox.pool.runners[()]
    return process_of(runner)


def process_of(runner: Any) -> subprocess.Popen[bytes]:
    process: subprocess.Popen[bytes] = runner.process
    return process


async def stocked(sandbox: Sandbox) -> Runner:
    """The one runner, once its spare boxes stand ready."""
    while True:
        for runner in sandbox.pool.runners[()]:
            if len(runner.spares) == SPARES:
                return runner
        await asyncio.sleep(0.01)


async def test_a_spare_box_has_the_limits_and_the_seed_of_its_session(sandbox: Sandbox) -> None:
    await sandbox.run("1")
    look = "import random, resource; random.random(), resource.getrlimit(7)[0]"
    for number in range(20, 23):
        ready = list((await stocked(sandbox)).spares)
        session = await sandbox.session(seed=5, open_files=number, memory_mb=300)
        assert (await session.cell(look)).stdout == f"(0.6229016948897019, {number})\n"
        assert session._box is not None and session._box[1] in ready
        # its file system has to be made for it
        large = await sandbox.session(disk_mb=100, file_mb=100)
        assert (await large.run("open('f', 'wb').write(bytes(90 << 20))")).ok
        for one in (session, large):
            await one.close()


async def test_idle_runners_and_spare_boxes_are_checked(own: Sandbox) -> None:
    await own.run("1")
    runner = await stocked(own)
    for _ in range(2):  # the second is the answer to the first ping
        await own.pool.inspect()
    assert own.pool.runners[()] == [runner] and not runner.stuck()
    process = process_of(runner)
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGSTOP)
    for spare in runner.spares:
        spare.heard -= 60.0
    assert (await own.run("print(1)")).stdout == "1\n"
    fresh = await stocked(own)
    assert fresh is not runner and not runner.alive
    assert own.counts == {Status.OK: 2}  # no session noticed

    process_of(fresh).kill()
    process_of(fresh).wait()
    await own.pool.inspect()
    newest = await stocked(own)
    assert newest is not fresh and (await own.run("print(1)")).stdout == "1\n"
    assert own.counts == {Status.OK: 3}


async def test_a_spare_box_that_is_asked_when_its_session_ends_is_closed(own: Sandbox) -> None:
    await own.run("1")
    runner = await stocked(own)
    assert isinstance(runner, Process)
    asked, pids = runner.spares[-1], (runner.process.pid, *descendants(runner.process.pid))
    asked.heard -= 60.0
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    taking = asyncio.ensure_future(own.pool.box(own.pool.limits, None, ()))
    assert await soon(lambda: asked not in runner.spares)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert asked.number not in runner.boxes
    assert await soon(lambda: not runner.busy) and runner.alive


async def test_an_answer_during_a_busy_event_loop_counts() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(1)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
    with theirs:
        answer = asyncio.ensure_future(channel.answer(0.05))
        await asyncio.sleep(0)
        theirs.send(guest_module("protocol/framing").pack({"status": "ok"}))
        time.sleep(0.2)  # as a training step does
        assert (await answer).header == {"status": "ok"}
        assert channel.lost is None  # else its whole runner would be ended over it
        with pytest.raises(BoxLost, match=r"no answer within 0\.05 s"):
            await channel.answer(0.05)
        channel.close()


class Own(Process):
    level = "landlock"


async def test_a_users_own_backend() -> None:
    here = "tests.sandbox.test_pool:"
    async with await open_sandbox(backend=f"{here}Own", min_level="landlock", workers=1) as sandbox:
        result = await sandbox.run("print(6 * 7)")
        assert (result.stdout, result.level, sandbox.level) == ("42\n", "landlock", "landlock")
        assert isinstance(sandbox.pool.runners[()][0], Own)
    with pytest.raises(SandboxUnavailable, match="weaker than"):
        await Sandbox.open(SandboxConfig(backend=f"{here}Own"))
    for wrong in (f"{here}Process", f"{here}stocked", "nothing"):
        with pytest.raises(ConfigError, match="sandbox backend"):
            await Sandbox.open(SandboxConfig(backend=wrong))


def test_a_killed_processes_resources_are_swept_everywhere(tmp_path: Path) -> None:
    left = subprocess.Popen(["sleep", "3600"])
    dead = f"{left.pid}-{owner.born(str(left.pid))}-{owner.name().split('-')[2]}"
    assert not any(owner.has_ended(name) for name in (dead, owner.name(), "12-34"))
    left.kill()
    left.wait()
    assert owner.has_ended(f"{dead}-7") and not owner.has_ended(dead.rpartition("-")[0] + "-5")
    folder = owner.new_folder("work")
    folder = folder.with_name(folder.name.replace(owner.name(), dead))
    (folder / "1").mkdir(parents=True)
    daemon = subprocess.Popen(["sleep", "3600"], cwd=folder / "1")
    assert owner.sweep() >= 1
    assert daemon.wait() == -signal.SIGKILL and not folder.exists()
    if cgroup.place() is None:
        return
    group = cgroup._make(Path("/sys/fs/cgroup/memory"), f"agentrl-runner-{dead}-1", 64 << 20)
    if group is not None:  # another parent than where ours would be now
        with subprocess.Popen(group.command(["sleep", "3600"])) as hog:
            assert comes(lambda: bool((group.folder / "runner" / "cgroup.procs").read_text()))
            assert cgroup.sweep() >= 1 and hog.wait() == -signal.SIGKILL
        assert not group.folder.exists()


# --- what a run leaves behind, and faults of the sandbox in one ---

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}


async def _open_and_close() -> None:
    await (await open_sandbox(backend="ns", workers=1)).close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_real_run_that_ends_early_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    asyncio.run(_open_and_close())
    assert main(["init", "code-task", str(tmp_path / "p")]) == 0
    run = start(tmp_path / "p", "rollout", "--model", "scripted", "-n", "500")
    pid = run.process.pid
    try:
        log = tmp_path / "p" / "runs" / "agentrl.db-wal"
        assert comes(
            lambda: log.is_file() and log.stat().st_size > 400_000, run.process.is_alive
        ), run.end()
        started = {child: owner.born(str(child)) for child in descendants(pid)}
        assert commands("sandbox/main.py"), "episodes run, so a runner does"
        os.kill(pid, number)
        code, output = run.end()
    finally:
        run.process.kill()
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL), output
    assert number == signal.SIGKILL or output.endswith("Error: Interrupted.\n")
    assert comes(lambda: not [pid for pid, born in started.items() if owner.born(str(pid)) == born])
    assert _of(Path(tempfile.gettempdir()), pid) == []
    if number == signal.SIGKILL:
        asyncio.run(_open_and_close())  # the next start sweeps what is left
    assert _of(Path("/sys/fs/cgroup"), pid) == []


def _of(top: Path, pid: int) -> list[str]:
    """Folders below `top` that are named after a process of these tests."""
    name = re.compile(rf"agentrl-(runner|work-\w+)-{pid}-")
    if top == Path(tempfile.gettempdir()):
        return [entry.name for entry in top.iterdir() if name.match(entry.name)]
    return [folder for _, folders, _ in os.walk(top) for folder in folders if name.match(folder)]


DEEP = """
import os, time
os.makedirs("a/shut"); os.chmod("a/shut", 0)
for _ in range(1500):
    os.mkdir("d"); os.chdir("d")
time.sleep(9)
"""
# Neither its folder nor its environment shows its owner.
SITS = "mkdir -p d/e; cd /; exec env -i sleep 45679.5"


async def test_a_killed_runners_resources_are_removed() -> None:
    async with await open_sandbox(
        backend="landlock", min_level="landlock", workers=1, wall=60.0
    ) as sandbox:
        session, deep = await sandbox.session(), await sandbox.session()
        await session.cell("x = 6")
        stopped = await deep.run(DEEP)
        assert (stopped.status, stopped.limit) == ("disk_limit", "inodes"), stopped.text()
        await deep.close()  # the runner deletes its folder, too deep to be walked, and lives on
        (runner,) = sandbox.pool.runners[()]
        assert isinstance(runner, Process) and (await session.cell("x * 7")).stdout == "42\n"
        sitting = asyncio.ensure_future(session.bash(SITS))
        assert await soon(lambda: bool(commands("45679.5")))
        started = {pid: owner.born(str(pid)) for pid in descendants(runner.process.pid)}
        assert runner.alive and not any(Status(name).infrastructure for name in sandbox.counts)
        runner.process.kill()
        runner.process.wait()
        await sandbox.pool.inspect()
        assert not runner.folder.exists()
        assert await soon(
            lambda: not [pid for pid, born in started.items() if owner.born(str(pid)) == born]
        )
        sitting.cancel()
        await asyncio.gather(sitting, return_exceptions=True)
        assert (await session.cell("x * 7")).stdout == "42\n"
    assert _of(Path(tempfile.gettempdir()), os.getpid()) == []


CLOSES = """
import threading
going = True
def close():
    while going: os.chmod('..', 0)
threading.Thread(target=close, daemon=True).start()
"""


async def test_a_folder_that_a_neighbour_closed_is_opened_again() -> None:
    async with await open_sandbox(backend="landlock", min_level="landlock", workers=1) as sandbox:
        closing, other = await sandbox.session(), await sandbox.session()
        assert (await closing.cell("import os; x = 6; os.chmod('..', 0)")).ok
        assert (await closing.cell(CLOSES)).ok  # and closes it while new boxes begin
        for _ in range(SPARES + 2):  # more than stand ready
            found = await (await sandbox.session()).cell("open('f', 'w').write('1')")
            assert found.ok, found.text()
        await closing.cell("going = False")
        results = [await other.run("print(6 * 7)"), await closing.cell("print(x * 7)")]
        assert [result.stdout for result in results] == ["42\n", "42\n"]
        await closing.cell("os.chmod('..', 0)")
        (runner,) = sandbox.pool.runners[()]
        assert isinstance(runner, Process)
        assert not any(Status(name).infrastructure for name in sandbox.counts)
    assert not runner.folder.exists()


PREY = """
import asyncio
from agentrl_cli.doctor.attacks import canaries
async def main():
    async with canaries() as prey:
        print(prey.folder, prey.process.pid, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_canaries_of_a_killed_process_are_swept() -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", PREY], env=ENV, stdout=subprocess.PIPE, text=True
    )
    with host:
        assert host.stdout is not None
        folder, pid = host.stdout.readline().split()
        born = owner.born(pid)
        assert owner.sweep() >= 0 and (Path(folder) / "secret").exists(), "its host lives"
        host.kill()
        host.wait()
    owner.sweep()
    assert not Path(folder).exists() and born and comes(lambda: owner.born(pid) != born)


MANY = "import os\nfor n in range(8_000):\n    os.mkdir(f'd{n}'); os.symlink('x' * 200, f'l{n}')"


async def test_a_cell_that_fills_the_folder_with_links_is_its_own_fault_and_leaves_nothing() -> (
    None
):
    async with await open_sandbox(
        backend="landlock", min_level="landlock", workers=1, wall=20.0, inodes=2000
    ) as sandbox:
        session = await sandbox.session()
        await session.cell("kept = 1")
        result = await session.cell(MANY)
        assert (result.status, result.detail) == (Status.DISK_LIMIT, "too many files"), (
            result.text()
        )
        assert (await session.cell("kept")).stdout == "1\n"
        assert (await sandbox.run(MANY)).status is Status.DISK_LIMIT
        (runner,) = sandbox.pool.runners[()]
        assert isinstance(runner, Process) and runner.folder.exists()
        await session.close()
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        assert not [status for status in sandbox.counts if Status(status).infrastructure]
    assert not runner.folder.exists()


CLOCK = "import time; a = time.monotonic(); time.sleep(0.1); print(a, time.monotonic())"


async def test_programs_wait_for_a_slot_in_turn(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.run(CLOCK) for _ in range(4 * AT_ONCE)))
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    for first, _ in spans:
        assert sum(begun <= first < ended for begun, ended in spans) <= AT_ONCE
    ends = sorted(ended for _, ended in spans)
    for place, (first, _) in enumerate(spans[AT_ONCE:]):
        assert ends[place] <= first, "a place has to be free first"
    assert all(early[0] < late[0] for early, late in zip(spans, spans[AT_ONCE + 1 :], strict=False))


# --- an infrastructure fault is tried once more, and never scored ---


class Flaky(Process):
    """A backend whose boxes go away when they are to run what says `poison`, as often as `left` says."""

    level = "ns"
    left: ClassVar[int] = 0

    async def open(self, limits: dict[str, Any]) -> Channel:
        channel = await super().open(limits)
        ask = channel.ask

        def lossy(header: dict[str, Any], body: bytes = b"") -> None:
            if b"poison" in body and Flaky.left > 0:
                Flaky.left -= 1
                channel.connection_lost(None)
            ask(header, body)

        vars(channel)["ask"] = lossy
        return channel


BACKEND: dict[str, Any] = {"backend": f"{__name__}:Flaky", "workers": 1}


async def test_one_loss_is_repaired_and_a_second_is_a_fault() -> None:
    from tests.sandbox.test_pool import Flaky  # the one that the backend's name leads to

    async with await open_sandbox(**BACKEND) as sandbox:
        context = ToolContext(session_factory=sandbox.session)
        python, bash = as_tool("run_python"), as_tool("bash")
        await python.call(context, {"code": "x = 6\nopen('f', 'w').write('7')"})
        Flaky.left = 1
        answer = await python.call(context, {"code": "x * int(open('f').read())  # poison"})
        assert (answer.text, answer.error) == ("42", None) and sandbox.counts[
            "sandbox_restarted"
        ] == 1
        Flaky.left = 2
        with pytest.raises(SandboxFault, match="failed twice"):
            await bash.call(context, {"command": "echo poison"})
        assert sandbox.counts["sandbox_restarted"] == 3 and sandbox.counts["ok"] == 2
        assert (
            await bash.call(context, {"command": "cat f"})
        ).text == "7"  # the session was rebuilt
        session = await context.session()
        Flaky.left = 2
        with pytest.raises(SandboxFault):
            await grade(session, "def f(): return 'poison'", [{"call": "f", "expect": 1}])
        await context.close()


CODE = """\
async def even(episode, ctx):
    session = await ctx.session()
    cell = await session.cell("1  # poison" if episode.sample == 0 else "1")
    slow = await session.run("while True: pass")
    large = await session.bash("head -c 3000000 /dev/zero > f")
    grade = await ctx.grade("def f(): return 1", [{"call": "f", "expect": 1}])
    assert (slow.limits.wall, large.limits.file_mb, slow.limits.memory_mb) == (0.3, 2, 512), slow.limits
    return float(cell.ok and slow.limit == "wall" and large.limit == "file_mb" and grade.ok)


REWARDS = {"even": even, "length": lambda episode, ctx: 0.0}
"""


async def test_such_an_episode_is_skipped_and_what_meets_a_packs_limits_is_counted(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    from tests.sandbox.test_pool import Flaky

    await (await open_sandbox(**BACKEND)).close()
    pack = write_pack(tmp_path / "pack", code=CODE)
    (pack / "task.yaml").write_text(
        TASK_YAML.replace("sandbox: false", "sandbox: {wall: 0.3, file_mb: 2}")
    )
    Flaky.left = 2  # both tries of the first step's sample 0; that of the second step goes well
    small, own = {"group_size": 3, "prompts_per_step": 1}, {**BACKEND, "memory_mb": 512}
    async with trainer_of(pack, model, train={"steps": 2}, rollout=small, sandbox=own) as trainer:
        run = await trainer.train()
        first, second = trainer.store.runs.steps(run.id)
        episodes = episodes_of(trainer.store, run, 1)
    assert run.error == "" and Flaky.left == 0
    lost = [episode for episode in episodes if episode.outcome is Outcome.SANDBOX_ERROR]
    assert [(e.sample, e.reward_parts, e.fact, e.advantage) for e in lost] == [
        (0, (), "skipped:fault: sandbox_error", None)
    ]
    assert "failed twice (sandbox_restarted)" in lost[0].error
    assert [e.reward for e in episodes if e not in lost] == [1.0, 1.0]
    assert first["rewards/even/mean"] == 1.0  # not 2/3: it was not scored zero
    assert (first["outcomes/sandbox_error"], first["facts/skipped:fault"]) == (1, 1)
    assert second.get("outcomes/sandbox_error", 0) == 0
    for row, played, restarts in ((first, 2, {"sandbox_restarted": 2}), (second, 3, {})):
        found = {name[8:]: row[name] for name in row if name.startswith("sandbox/")}
        met = dict.fromkeys(("timeout", "limit/wall", "disk_limit", "limit/file_mb"), played)
        assert found == {**restarts, **met, "ok": 3 * played}
    shown = cli("show", run.name, "--db", str(pack / "runs" / "agentrl.db"))
    assert "sandbox/limit/wall" in shown and "sandbox/ok" in shown


# --- cgroups of version 2, against its files and, where one can be mounted, the kernel's own; why no level starts ---


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


# --- other programs on the same processor: what a box waits for one counts neither against its limits nor its grade ---

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
