"""What a sandbox session is given by packs, tools, configuration and command line, and what is shown of it."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import (
    ByteTokenizer,
    Chat,
    Config,
    Episode,
    Pack,
    RewardPart,
    ScriptedPolicy,
    Store,
    load_pack,
    tool,
)
from agentrl_cli.chat_session.open import _sandbox
from agentrl_cli.commands import main
from agentrl_cli.errors import ConfigError, MissingDependency, SandboxUnavailable
from agentrl_cli.reports.score_sets import grader_imports
from agentrl_cli.rewards import Reward, RewardContext
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import ExecResult, Limits, Sandbox, Session, grade, image
from agentrl_cli.sandbox.container import Container
from agentrl_cli.sandbox.launch import Launch
from agentrl_cli.sandbox.results import read_options
from agentrl_cli.sandbox.runner_process import Process
from agentrl_cli.store.new_run import new_run
from agentrl_cli.tools import ToolContext, as_tool
from agentrl_cli.tui.chat.view import ready_lines
from agentrl_cli.tui.whatif.view import event_lines
from tests.helpers.cli import Cli
from tests.helpers.sandbox import open_sandbox

TASK_PY = "def right(episode, ctx): return 1.0\nREWARDS = {'right': right}\n"
TASK_YAML = "name: made\ntools: [run_python]\nrewards: {right: {primary: true}}\nsandbox: SANDBOX\n"


def pack(tmp_path: Path, sandbox: str) -> Pack:
    folder = tmp_path / "made"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(TASK_PY)
    (folder / "task.yaml").write_text(TASK_YAML.replace("SANDBOX", sandbox))
    return load_pack(folder)


async def session_of(pack: Pack, sandbox: Sandbox, seed: int = 0) -> Session:
    opener = pack.open_session(sandbox, seed)
    assert opener is not None and pack.open_session(None, 0) is None
    session: Session = await opener()
    return session


async def drawn(session: Session, imports: str = "random") -> str:
    return (await session.cell(f"import {imports}; random.random()")).stdout


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {}), (True, {}), (False, {}), ({}, {}),
        ({"imports": ["numpy"], "seed": 3, "wall": 1.5}, {"imports": ("numpy",), "seed": 3, "wall": 1.5}),
    ],
)  # fmt: skip
def test_a_packs_options_are_read(value: Any, expected: dict[str, Any]) -> None:
    assert read_options(value, "task.yaml: sandbox") == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("yes please", "must be true, false, or limits"), ({"import": ["numpy"]}, "import"),
        ({"imports": "numpy"}, "sandbox.imports"), ({"imports": ["../x"]}, "must be a list of package names"),
        ({"wall": "long"}, "sandbox.wall"), ({"memory_mb": 1.5}, "sandbox.memory_mb"), ({"wall": -1}, "sandbox.wall"),
        ({"seed": -1}, "sandbox.seed"), ({"backend": "bare"}, "backend"),
    ],
)  # fmt: skip
def test_a_packs_wrong_options_are_reported(value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(value, "task.yaml: sandbox")
    assert says in caught.value.message


async def test_a_packs_sessions_have_its_packages_limits_and_seed(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    made = pack(tmp_path, "{imports: [numpy], seed: 7, wall: 0.5, memory_mb: 2048}")
    assert made.sandbox and made.imports == ("numpy",)
    await sandbox.check(made.imports)
    session = await session_of(made, sandbox)
    code = "import numpy, random\nrandom.random(), float(numpy.random.rand()), numpy.random.default_rng is not None"
    first = await session.cell(code)
    other = await (await session_of(made, sandbox, seed=99)).cell(code)
    assert first.stdout == other.stdout and first.stdout.endswith("True)\n")
    assert first.stdout.startswith("(0.32383276483316237, ")  # random.Random(7).random()
    assert (await session.cell("while True: pass")).text().startswith("[timed out after 0.5 s")
    assert (session.limits.memory_mb, session.limits.wall) == (2048, 0.5)
    solution = "import numpy\ndef f(): return int(numpy.ones(3).sum())"
    graded = await grade(session, solution, [{"call": "f", "expect": 3}])
    assert graded.ok, graded


async def test_without_a_seed_each_episode_has_its_own_and_draws_the_same_again(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    made = pack(tmp_path, "true")
    seen = [await drawn(await session_of(made, sandbox, seed)) for seed in (1, 1, 2)]
    assert seen[0] == seen[1] != seen[2]
    assert await drawn(await sandbox.session()) != await drawn(await sandbox.session())


async def test_the_configuration_gives_packages_and_a_seed_to_every_session(tmp_path: Path) -> None:
    async with await open_sandbox(workers=1, imports=["numpy"], seed=5) as sandbox:
        assert list(sandbox.pool.runners) == [("numpy",)]  # the bare runner is never needed
        one = await drawn(await sandbox.session(episode_seed=1), "numpy, random")
        two = await drawn(await session_of(pack(tmp_path, "true"), sandbox, 2))
        own = await drawn(await session_of(pack(tmp_path, "{seed: 6}"), sandbox))
    assert one == two != own
    with pytest.raises(MissingDependency, match="no_such_package"):
        await open_sandbox(imports=["no_such_package"])
    with pytest.raises(ConfigError, match="imports must be a list of package names"):
        await open_sandbox(imports=["a,b"])


async def test_a_tool_brings_its_packages(sandbox: Sandbox, tmp_path: Path) -> None:
    @tool
    def plot(data: str) -> str:
        """Plot data.

        Args:
            data: Numbers.
        """
        return data

    plot.imports = ("numpy",)
    rewards = pack(tmp_path, "true").rewards
    made = Pack.of("made", [{"prompt": "go"}], rewards, tools=[plot, "run_python"], sandbox=True)
    assert made.imports == ("numpy",)
    assert (await (await session_of(made, sandbox)).cell("import numpy")).ok


def test_the_command_takes_packages_and_files(tmp_path: Path, cli: Cli) -> None:
    asyncio.run(_available())
    given, made = tmp_path / "in.txt", tmp_path / "out.txt"
    given.write_text("6")
    (tmp_path / "p.py").write_text(
        "import numpy, os\nopen('out.txt', 'w').write(str(7 * int(open('in.txt').read())))\n"
        "os.symlink('/etc/passwd', 'leak')"
    )
    command = ("sandbox", "run", "p.py", "--imports", "numpy", "--in", "in.txt", "--out", "out.txt")
    cli(*command, said="wrote out.txt, 2 bytes")
    assert made.read_text() == "42"
    cli(*command, "--out", "leak", code=2, said="it is a link, and links are not followed")
    assert not (tmp_path / "leak").exists()
    made.unlink()
    made.symlink_to("in.txt")
    cli(*command, code=2)  # nor is a link here
    assert given.read_text() == "6"
    cli("sandbox", "run", "p.py", "--in", "missing", code=2)
    cli(*command, "--in", "a/in.txt", code=2, said="Two files of --in have one name")
    cli(*command, "--out", "a/out.txt", code=2, said="Two files of --out have one name")
    cli("sandbox", "run", "p.py", "--imports", "no_such_package", code=3)


async def _available() -> None:
    await (await open_sandbox(workers=1)).close()


async def test_of_a_python_in_a_home_only_programs_and_libraries_are_visible(
    sandbox: Sandbox,
) -> None:
    if sys.base_prefix.startswith("/usr") or sandbox.level != "ns":
        pytest.skip("the interpreter is the system's")
    seen = await sandbox.run(f"import os; print(*sorted(os.listdir({sys.base_prefix!r})))")
    assert seen.ok and set(seen.stdout.split()) <= {"bin", "lib", "lib64"}, seen.text()
    other = await (await sandbox.session()).bash(
        "python3 -c 'import ssl, sqlite3, ctypes; print(6 * 7)'"
    )
    assert other.stdout == "42\n", other.text()


def test_scoring_again_finds_the_packages_of_the_packs(tmp_path: Path) -> None:
    pack(tmp_path, "{imports: [numpy]}")
    config = Config()
    config.task.packs = ["made", "code-task", "missing"]
    assert grader_imports(config.task.packs, tmp_path) == ("numpy",)


async def test_limits_of_a_session_are_numbers_above_nothing(sandbox: Sandbox) -> None:
    wrong: list[tuple[str, Any]] = [
        ("wall", -1),
        ("memory_mb", 0),
        ("cpu", "x"),
        ("disk_mb", True),
        ("memory", 5),
    ]
    for limit, value in [*wrong, ("cpu", float("nan"))]:
        with pytest.raises(ConfigError, match=rf"the limits of a session.*{limit}"):
            await sandbox.session(**{limit: value})


# --- every Python that the package supports ---


WHERE = "import sys; print(sys.version_info[:2] == (3, int(sys.argv[1])), sys.executable, sys.base_prefix, sep='\\n')"
PROGRAM = b"import atexit, threading\natexit.register(print, 2)\nthreading.Thread(target=print, args=(1,)).start()"


def interpreter(minor: int) -> tuple[str, str]:
    """Path and prefix of Python 3.`minor`; skips the test if absent."""
    try:
        done = subprocess.run(
            [f"python3.{minor}", "-c", WHERE, str(minor)],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"Python 3.{minor} is not installed")
    right, python, prefix = done.stdout.splitlines()
    assert right == "True"
    return python, prefix


@pytest.mark.parametrize("minor", [11, 12, 13])
async def test_programs_cells_and_rollback_work_on(minor: int) -> None:
    python, prefix = interpreter(minor)
    try:
        runner = await Process.start(Launch("ns", (), python, prefix), 1, Limits())
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    try:
        channel = await runner.open(Limits().model_dump())

        async def ask(op: str, code: bytes) -> tuple[Any, bytes]:
            channel.ask({"op": op, "split": len(code)}, code)
            frame = await channel.answer(20.0)
            return frame.header["status"], frame.body

        for _ in range(3):  # the first by a fork of the box, the last by a template
            assert await ask("run", PROGRAM) == ("ok", b"1\n2\n")
            assert await ask("run", b"print(1)") == ("ok", b"1\n")
        assert await ask("cell", b"x = 41\nimport os, random\nrandom.seed(5)") == ("ok", b"")
        for drawn in (b"0.62", b"0.74"):
            assert await ask("cell", b"x = random.random()\nos.kill(os.getpid(), 9)") == (
                "crashed",
                b"",
            )
            assert await ask("cell", b"x + 1, round(random.random(), 2)") == (
                "ok",
                b"(42, %s)\n" % drawn,
            )
    finally:
        await runner.close()


def test_the_command_for_other_machines_has_the_packages_of_the_tag() -> None:
    words = shlex.split(image.docker_command(("yaml",)))
    assert words[:4] == ["docker", "build", "-t", image.tag(("yaml",))]
    assert words[4:6] == ["--build-arg", "PACKAGES=pyyaml"]
    assert Path(words[6], "Dockerfile").is_file() and len(words) == 7
    assert len(shlex.split(image.docker_command())) == 5


async def test_the_hint_for_a_container_that_does_not_start_makes_its_image_again() -> None:
    launch = Launch("docker", ("yaml",))
    hint = Container(None, launch, Limits()).unavailable("it did not come up").hint
    assert f"docker rmi -f {image.tag(launch.imports)} && agentrl sandbox build-image" in hint
    assert "--import yaml" in hint


# --- what is shown: the level of every call, grades that the solution could have forged ---


SOLUTION = "def add(a, b):\n    return a + b\n"


async def apart(episode: Episode, ctx: RewardContext) -> float:
    return (await ctx.grade(SOLUTION, [{"call": "add", "args": [1, 2], "expect": 3}])).score


async def beside(episode: Episode, ctx: RewardContext) -> float:
    return (
        await ctx.grade(
            SOLUTION + "c = base", ["assert add(1, c) == 8"], setup="base = 7", budget=9.0
        )
    ).score


async def after(episode: Episode, ctx: RewardContext) -> RewardPart:
    return RewardPart("after", 1.0, 0.0)


REWARDS = [
    Reward("apart", apart, primary=True),
    Reward("beside", beside, 0.5),
    Reward("after", after),
]
PACK = Pack.of(
    "made", [{"prompt": "go"}], REWARDS, tools=["run_python", "calculator"], sandbox=True
)
CALLS = "".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    for name, arguments in (
        ("run_python", {"code": "6 * 7"}),
        ("calculator", {"expression": "1 + 1"}),
    )
)


def fill(path: Path, config: Config) -> str:
    """One episode of both kinds of tools and rewards; its id."""
    tokenizer = ByteTokenizer()
    config.rollout.max_tokens, config.rollout.max_new_tokens = 6000, 1000

    async def make() -> str:
        async with await open_sandbox(**config.sandbox.model_dump()) as sandbox:
            with Store.open(path) as store:
                store.tokenizers.add(tokenizer.hash, tokenizer.json, "", dict(tokenizer.specials))
                policy = ScriptedPolicy([CALLS, "done"], tokenizer)
                row = new_run(
                    config, store, kind="rollout", packs=["made"], tokenizer=tokenizer.hash
                )
                more: dict[str, Any] = {"sandbox": sandbox, "store": store, "run": row}
                rollout = Rollout(policy, Chat(tokenizer), {"made": PACK}, config, **more)
                await rollout.with_(temperature=0.0).run([])  # as an evaluation of the same run
                await rollout.run([])
                return (await rollout.run([Job(PACK.tasks("train")[0], 0, run_id=row.id)]))[0].id

    return asyncio.run(make())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("truth") / "agentrl.db"
    return path, fill(path, Config())


def test_the_store_knows_levels_and_which_parts_are_fakeable(made: tuple[Path, str]) -> None:
    with Store.open(made[0], readonly=True) as store:
        episode, row = store.episodes.get(made[1]), store.episodes.row(made[1])
    assert [(part.name, part.value, part.fakeable) for part in episode.reward_parts] == [
        ("apart", 1.0, False), ("beside", 1.0, True), ("after", 1.0, False),
    ]  # fmt: skip
    results = next(turn.results for turn in episode.turns if turn.role == "tool")
    assert [result.level for result in results] == ["ns", ""] and row.level == "ns"


def test_they_are_shown_and_exported(made: tuple[Path, str], cli: Cli) -> None:
    db, episode = ("--db", str(made[0])), made[1]
    shown = cli("show", episode, *db)
    line = next(line for line in shown.splitlines() if line.startswith("beside"))
    assert "FAKEABLE: tests ran beside the solution" in line and shown.count("FAKEABLE") == 1
    assert "sandbox ns" in shown and ", ns)" in shown
    replayed = cli("replay", episode, "--plain", *db)
    assert "sandbox ns" in replayed and replayed.count("FAKEABLE by the solution") == 1
    exported = cli.json("show", episode, *db)
    assert [part["fakeable"] for part in exported["reward_parts"]] == [False, True, False]
    rerun = cli("export", episode, *db)
    assert '"fakeable": true' in rerun or '"fakeable":true' in rerun


# What a user has to write to get no isolation.
NAKED = Config.model_validate({"sandbox": {"backend": "bare", "min_level": "bare", "workers": 1}})


def test_a_run_without_isolation_is_marked_everywhere(tmp_path: Path, cli: Cli) -> None:
    db = tmp_path / "agentrl.db"
    episode = fill(db, NAKED)
    with Store.open(db, readonly=True) as store:
        row, journal = store.episodes.row(episode), store.journal
        assert row.level == "bare" and row.run_id is not None
        # once, however many rounds a run has
        (event,) = (one for one in journal.events(row.run_id) if one["kind"] == "no_isolation")
        (alert,) = (
            one for one in journal.folded_alerts(row.run_id) if one["name"] == "no_isolation"
        )
    found = (event["data"]["level"], alert["level"], alert["count"])
    assert found == ("bare", "bad", 1)
    assert "isolates NOTHING" in str(alert["text"])
    for command in (["show", episode], ["replay", episode, "--plain"]):
        assert "bare: NO ISOLATION" in cli(*command, "--db", str(db))


SHORT = (
    "--set train.steps=1 --set train.eval.every=0 --set rollout.group_size=2 --set rollout.prompts_per_step=1"
    " --set rollout.max_turns=1 --set rollout.max_new_tokens=4"
)
GRADED = (
    "async def graded(episode, ctx):\n"
    "    return (await ctx.grade('def f(): return 1', [{'call': 'f', 'expect': 1}])).score\n"
)


def test_commands_that_run_code_warn(tmp_path: Path, cli: Cli) -> None:
    cli("init", "code-task", "p", "--min-level", "bare")
    project = tmp_path / "p"
    (project / "mine.py").write_text(GRADED)
    for path in (project / "data").iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    bare = "--set sandbox.backend=bare --set sandbox.workers=1".split()
    base = "--checkpoint base --compare-to none --set model.name=scripted --limit 1".split()
    for command in (
        ["rollout", "--model", "scripted", "-n", "1"],
        ["eval", *base],
        ["check", str(project)],  # whose tools may find too many processes of other users
        ["tools", "call", "run_python", '{"code": "1"}'],
        ["train", *SHORT.split()],
        ["rescore", "last", "--reward", f"{project / 'mine.py'}:graded"],
    ):
        cli.capture.readouterr()
        main([*command, "--project", str(project), *bare])
        said = cli.capture.readouterr().err
        assert "WARNING: Sandbox level bare isolates NOTHING" in said, command


class Naked(Process):
    """A backend of a project's own that isolates nothing."""

    level = "bare"


def test_what_is_refused_is_not_warned_of(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "program.py").write_text("import os\nprint(os.getuid())")
    run = ("sandbox", "run", "program.py", "--set")
    cli(*run, "sandbox.backend=bare", code=3, said="weaker than sandbox.min_level ns")
    assert "WARNING" not in cli.err
    who = "runs as an ordinary user of this machine" if os.geteuid() == 0 else "runs as you"
    for backend in ("bare", f"{__name__}:Naked"):
        accepted = (f"sandbox.backend={backend}", "--set", "sandbox.min_level=bare")
        output = cli(*run, *accepted, said=who)
        assert (int(output) == os.getuid()) == (os.geteuid() != 0)


async def test_a_chat_and_a_what_if_warn_too() -> None:
    sandbox, note = await _sandbox(NAKED.sandbox, PACK)
    assert sandbox is not None
    await sandbox.close()
    event = {"ev": "ready", "model": "m", "weights": "", "context": 1, "tools": []}
    event |= {"sandbox": "bare", "note": note}
    assert any("isolates NOTHING" in line.plain for line in ready_lines(event))
    assert "isolates NOTHING" in event_lines(event)[0].plain


async def in_code(code: str, ctx: ToolContext) -> str:
    """A user's own tool, which returns a text."""
    result: ExecResult = await (await ctx.session()).run(code)
    if not result.ok:
        raise ValueError(result.text())
    return result.stdout


async def test_every_call_that_used_a_sandbox_knows_its_level() -> None:
    async with await open_sandbox() as sandbox:
        ctx = ToolContext(session_factory=sandbox.session)
        own, sleepy = as_tool(in_code), as_tool(in_code)
        sleepy.timeout = 0.2
        given = ((own, "print(1)"), (own, "1 / 0"), (sleepy, "while True: pass"))
        results = await asyncio.gather(*(one.call(ctx, {"code": code}) for one, code in given))
        await ctx.close()
    found = [(result.error, result.level) for result in results]
    assert found == [(error, sandbox.level) for error in (None, "exception", "timeout")]
