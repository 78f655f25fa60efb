"""The docker level against a real engine: the same attacks and cheats, neighbours in one container, nothing left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main
from agentrl_cli.config import SandboxConfig
from agentrl_cli.errors import ConfigError, SandboxFault, SandboxUnavailable
from agentrl_cli.sandbox import Limits, Sandbox, Status, container, grade, image, owner
from agentrl_cli.sandbox.launch import Launch
from tests.helpers.processes import comes
from tests.helpers.train import start
from tests.sandbox.attacks import attack_all, contained_attacks
from tests.sandbox.test_attacks import CHEATS, HONEST, HOST, TESTS


async def test_a_missing_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxUnavailable, match="No Docker engine answers"):
        await Sandbox.open(SandboxConfig(backend="docker", workers=1))


LEVEL = "docker"


@pytest.fixture(scope="module", autouse=True)
def api() -> Any:
    """The engine, with the image built; the tests skip where none answers."""
    try:
        engine = container.connect()
        image.build(engine)
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    yield engine
    engine.close()


def ours(api: Any, pid: int = os.getpid()) -> list[str]:
    """The containers of a process, by default of this one."""
    found = api.containers(all=True, filters={"label": container.LABEL})
    return [one["Id"] for one in found if one["Labels"]["agentrl.process"].startswith(f"{pid}-")]


async def test_every_attack_is_contained(sandbox: Sandbox) -> None:
    verdicts = await attack_all(sandbox, contained_attacks(), wall=0.6)
    assert {v.attack: v.problems for v in verdicts if not v.contained} == {}
    assert len(verdicts) == 88


async def test_no_cheat_passes(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    for name, code in CHEATS.items():
        graded = await grade(session, code, TESTS, wall=0.2)
        assert not graded.ok and not graded.fakeable, name
        assert graded.passed == 0 or (
            graded.passed == 1 and name in ("forges replies", "patches json")
        ), name
    honest = await grade(session, HONEST, TESTS)
    assert (honest.passed, honest.level) == (8, "docker")


async def test_a_session_keeps_and_rolls_back(sandbox: Sandbox) -> None:
    session = await sandbox.session(memory_mb=200, keep=2)
    assert (await session.cell("x = 1\nb = b'x' * (120 << 20)")).ok
    assert (await session.cell("import time; time.sleep(0.4); len(b) >> 20")).stdout == "120\n"
    for code, status in {
        "x = 2\nwhile True: pass": Status.TIMEOUT, "x = 2\nimport ctypes; ctypes.string_at(0)": Status.CRASHED,
        "x = 2\nc = bytearray(4 << 30)": Status.MEMORY,
    }.items():  # fmt: skip
        result = await session.cell(code, wall=0.4)
        assert (result.status, result.rolled_back, result.state_kept, result.level) == (
            status,
            True,
            True,
            "docker",
        )
    assert (await session.cell("x")).stdout == "1\n"
    await session.cell("x = 5")
    assert await session.back(len(session.history)) == ()
    assert (await session.cell("x")).stdout == "1\n"
    lost = await session.cell("import os; os.kill(-1, 9); os.abort()")
    assert lost.status is Status.STATE_LOST and (await session.cell("2")).stdout == "2\n"


async def test_neighbours_in_one_container_are_apart(sandbox: Sandbox) -> None:
    mine, theirs = await sandbox.session(), await sandbox.session()
    await mine.cell("secret = 'canary-of-a-neighbour'; open('f', 'w').write(secret)")
    running = asyncio.ensure_future(mine.bash(": canary-of-a-neighbour; sleep 1; echo alive"))
    await asyncio.sleep(0.2)
    spy = await theirs.run(
        "import glob, os\nseen = []\n"
        "for p in glob.glob('/proc/[0-9]*'):\n"
        "    for f in ('cmdline', 'environ', 'mem', 'maps', 'cwd/f', 'root/etc/passwd', 'fd/1'):\n"
        "        try: seen.append(open(f'{p}/{f}', 'rb').read(4096) if p != f'/proc/{os.getpid()}' else b'')\n"
        "        except OSError: 0\n"
        "for slot in range(64):\n"
        "    try: print('LEAK', os.listdir(f'/box/{slot}')) if not os.getcwd().startswith(f'/box/{slot}/') else 0\n"
        "    except OSError: 0\n"
        "    try: open(f'/box/{slot}/x', 'w'); print('LEAK') if not os.getcwd().startswith(f'/box/{slot}/') else 0\n"
        "    except OSError: 0\n"
        "print(b'canary' in b''.join(seen), os.getuid() > 1000, os.getgroups())\n"
        "for p in glob.glob('/proc/[0-9]*'):\n"
        "    try: os.kill(int(p[6:]), 0); print(p[6:] in (str(os.getpid()), str(os.getppid())) or 'own')\n"
        "    except OSError: 0\n"
        "os.kill(-1, 9)"
    )
    assert "LEAK" not in spy.stdout and spy.stdout.startswith("False True []\n")
    assert (await running).stdout == "alive\n"
    assert (await mine.cell("secret")).stdout == "'canary-of-a-neighbour'\n"
    assert sandbox.counts[Status.SANDBOX_RESTARTED] == 0


async def test_a_slot_is_clean_for_the_next_box(sandbox: Sandbox) -> None:
    first = await sandbox.session()
    await first.bash("mkdir -p a/b; echo x > a/b/c; chmod 000 a/b a; setsid sleep 876 & sleep 0.1")
    (runner,) = sandbox.pool.runners[()]
    await first.close()
    for _ in range(container.SLOTS + 1):
        assert (await sandbox.run("import os; print(os.listdir('..'))")).stdout.count(",") == 0
    assert runner.alive and (await sandbox.run("import os; print(os.getcwd())")).ok


async def test_a_lost_container_is_replaced(sandbox: Sandbox, api: Any) -> None:
    session = await sandbox.session()
    await session.cell("x = 41")
    for one in ours(api):
        api.kill(one)
    await asyncio.sleep(0.5)
    assert (await session.cell("x + 1")).stdout == "42\n"
    assert sandbox.counts[Status.SANDBOX_RESTARTED] == 1


FORKS = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"


@pytest.mark.parametrize("op", ["run", "cell"])
async def test_a_fork_bomb_costs_little_more_than_its_wall_limit(sandbox: Sandbox, op: str) -> None:
    # Few MiB, so that every look at their memory has to be the exact one, which waits for forks.
    session = await sandbox.session(wall=0.5, memory_mb=256, keep=2)
    await session.cell("x = 1")
    await session.cell("y = 2")
    result = await getattr(session, op)(FORKS)
    assert result.status in (Status.TIMEOUT, Status.MEMORY) and result.stopped > 8
    assert (result.state_kept, result.rolled_back) == (True, op == "cell")
    assert (await session.cell("x + y")).stdout == "3\n"  # what was halted with the bomb goes on
    assert (
        await session.back(2) == () and (await session.cell("'y' in globals()")).stdout == "False\n"
    )
    assert sandbox.counts[Status.SANDBOX_RESTARTED] == 0


async def test_a_cancelled_start_leaves_no_container(api: Any) -> None:
    before = ours(api)
    for seconds in (0.01, 0.05, 0.2):
        starting = asyncio.create_task(container.Container.start(Launch("docker"), 7, Limits()))
        await asyncio.sleep(seconds)
        starting.cancel()
        await asyncio.wait([starting])
        assert ours(api) == before


async def test_a_dead_processes_resources_are_swept(api: Any) -> None:
    dead = f"999999999-1-{owner.name().split('-')[2]}"
    labels = {container.LABEL: container._machine(), "agentrl.process": dead}
    left = api.create_container(image.tag(), ["sleep", "60"], labels=labels)["Id"]
    mine = {container.LABEL: "another machine", "agentrl.process": dead}
    other = api.create_container(image.tag(), ["sleep", "60"], labels=mine)["Id"]
    try:
        assert container.sweep(api) <= 1  # another test's start may have done it
        ids = [found["Id"] for found in api.containers(all=True)]
        assert left not in ids and other in ids
    finally:
        api.remove_container(other, force=True)


def test_nothing_is_left_when_the_host_dies(api: Any) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, "docker"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with host:
        assert host.stdout is not None and host.stdout.readline() == b"up\n"
        time.sleep(0.5)
        host.kill()
        host.wait()
    assert comes(lambda: not ours(api, host.pid)), "the container is still there"


SHORT = (
    "train.eval.every=0",
    "rollout.group_size=2",
    "rollout.prompts_per_step=1",
    "rollout.max_new_tokens=64",
    "sandbox.backend=docker",
    "sandbox.workers=1",
)


def test_a_run_that_is_interrupted_leaves_no_container(api: Any, tmp_path: Path) -> None:
    assert main(["init", "code-task", str(tmp_path / "p")]) == 0
    run = start(tmp_path / "p", "train", *(part for word in SHORT for part in ("--set", word)))
    process = run.process
    try:
        assert comes(lambda: bool(ours(api, process.pid)), process.is_alive)
        time.sleep(1.0)  # episodes run in it
        assert ours(api, process.pid) and process.is_alive(), run.log.read_text()
        os.kill(process.pid, signal.SIGINT)
        assert run.end()[0] == 130, run.log.read_text()
        assert comes(lambda: not ours(api, process.pid))
    finally:
        process.kill()
        process.join()


def test_the_tag_depends_on_the_content(api: Any) -> None:
    assert image.tag() == image.build(api) != image.tag(("numpy",))
    assert image.tag(("numpy",)) == image.tag(("numpy",))


async def test_without_an_image_the_message_says_how_to_make_one(api: Any) -> None:
    before = ours(api)
    async with await Sandbox.open(SandboxConfig(backend="docker", workers=1)) as sandbox:
        session = await sandbox.session(imports=("yaml",))
        with pytest.raises(
            SandboxFault
        ) as caught:  # in the middle of a run: the episode is masked, not scored
            await session.cell("1")
        assert len(ours(api)) == len(before) + 1
    assert "build-image --import yaml" in caught.value.hint and ours(api) == before


async def test_more_memory_than_a_container_has_is_refused(sandbox: Sandbox) -> None:
    most = container._memory(sandbox.limits) >> 20
    with pytest.raises(ConfigError, match=rf"{most + 1} MiB of memory.*{most} MiB for all"):
        await sandbox.run("1", memory_mb=most + 1)
    assert (
        await sandbox.run("print(1)", memory_mb=min(most, 2 * sandbox.limits.memory_mb))
    ).stdout == "1\n"


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


async def test_a_kill_elsewhere_changes_no_result(sandbox: Sandbox, small_group: Path) -> None:
    bomb = f"import os; open('{small_group}/cgroup.procs', 'w').write(str(os.getpid())); b'x' * (300 << 20)"
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
