"""A real run that is interrupted or killed leaves nothing behind; sessions get slots in turn."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl_cli.commands import main
from agentrl_cli.errors import SandboxFault
from agentrl_cli.sandbox import Sandbox, Status, grade, owner
from agentrl_cli.sandbox.channel import Channel
from agentrl_cli.sandbox.pool import SPARES
from agentrl_cli.sandbox.runner_process import AT_ONCE, Process
from agentrl_cli.tools import ToolContext, as_tool
from agentrl_cli.types import Outcome
from tests.helpers.cli import Cli
from tests.helpers.processes import comes, commands, descendants, soon
from tests.helpers.sandbox import open_sandbox
from tests.helpers.train import TASK_YAML, episodes_of, start, trainer_of, write_pack

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
    from tests.sandbox.test_cleanup import Flaky  # the one that the backend's name leads to

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
    from tests.sandbox.test_cleanup import Flaky

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
