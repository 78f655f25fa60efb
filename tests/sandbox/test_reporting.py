"""What is shown of the sandbox: the level of every call, grades that the solution could have forged."""

import asyncio
import json
import os
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
)
from agentrl_cli.chat_session.open import _sandbox
from agentrl_cli.commands import main
from agentrl_cli.rewards import Reward, RewardContext
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import ExecResult
from agentrl_cli.sandbox.runner_process import Process
from agentrl_cli.store.new_run import new_run
from agentrl_cli.tools import ToolContext, as_tool
from agentrl_cli.tui.chat.view import ready_lines
from agentrl_cli.tui.whatif.view import event_lines
from tests.helpers.cli import Cli
from tests.helpers.sandbox import open_sandbox

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
