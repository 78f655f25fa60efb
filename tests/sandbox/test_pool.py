"""The pool: many sessions, lost and stuck runners, levels, packages; what a run leaves that is killed."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import SandboxConfig
from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.errors import ConfigError, MissingDependency, SandboxFault, SandboxUnavailable
from agentrl_cli.sandbox import Sandbox, Status, cgroup, owner
from agentrl_cli.sandbox.channel import BoxLost, Channel, guest_module
from agentrl_cli.sandbox.container import BoxTransport, Container
from agentrl_cli.sandbox.launch import Launch
from agentrl_cli.sandbox.pool import SPARES
from agentrl_cli.sandbox.runner_process import Process, Runner
from agentrl_cli.tools import ToolContext
from agentrl_cli.tools.session import TOOL as run_python
from tests.helpers.processes import alive, comes, commands, descendants, soon
from tests.helpers.sandbox import open_sandbox


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


async def test_a_box_that_answers_late_or_is_closed() -> None:
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
        channel.lost = None
        theirs.send(guest_module("protocol/framing").pack({"more": 0.1}))
        with pytest.raises(BoxLost, match=r"no answer within 0\.15 s"):
            await channel.answer(0.05)
        channel.close()
    container = Container(None, Launch("docker"), LimitsConfig())
    channel = container.boxes[1] = Channel(1)
    channel.connection_made(BoxTransport(container, 1))
    answer = asyncio.ensure_future(channel.answer(60.0))
    await asyncio.sleep(0)
    container.drop(channel)  # its stream reports no end of a box that is closed here
    with pytest.raises(BoxLost, match="the box is closed"):
        await answer


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


# --- an infrastructure fault is tried once more, and never scored ---


# --- cgroups of version 2, against its files and, where one can be mounted, the kernel's own; why no level starts ---


# --- other programs on the same processor: what a box waits for one counts neither against its limits nor its grade ---
