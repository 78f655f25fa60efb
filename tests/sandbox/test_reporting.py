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


def run(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(list(command)) == 0
    return capsys.readouterr().out


def test_they_are_shown_and_exported(
    made: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    db, episode = str(made[0]), made[1]
    shown = run(capsys, "show", episode, "--db", db)
    line = next(line for line in shown.splitlines() if line.startswith("beside"))
    assert "FAKEABLE: tests ran beside the solution" in line and shown.count("FAKEABLE") == 1
    assert "sandbox ns" in shown and ", ns)" in shown
    replayed = run(capsys, "replay", episode, "--plain", "--db", db)
    assert "sandbox ns" in replayed and replayed.count("FAKEABLE by the solution") == 1
    exported: dict[str, Any] = json.loads(run(capsys, "show", episode, "--json", "--db", db))
    assert [part["fakeable"] for part in exported["reward_parts"]] == [False, True, False]
    rerun = run(capsys, "export", episode, "--db", db)
    assert '"fakeable": true' in rerun or '"fakeable":true' in rerun


# What a user has to write to get no isolation.
NAKED = Config.model_validate({"sandbox": {"backend": "bare", "min_level": "bare", "workers": 1}})


def test_a_run_without_isolation_is_marked_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = tmp_path / "agentrl.db"
    episode = fill(db, NAKED)
    with Store.open(db, readonly=True) as store:
        row = store.episodes.row(episode)
        assert row.level == "bare" and row.run_id is not None
        events = [
            event for event in store.journal.events(row.run_id) if event["kind"] == "no_isolation"
        ]
        assert [event["data"]["level"] for event in events] == [
            "bare"
        ]  # once, however many rounds a run has
        alerts = [
            alert for alert in store.journal.alerts(row.run_id) if alert["name"] == "no_isolation"
        ]
        assert [alert["level"] for alert in alerts] == ["bad"] and "isolates NOTHING" in str(
            alerts[0]["text"]
        )
    for command in (["show", episode], ["replay", episode, "--plain"]):
        assert "bare: NO ISOLATION" in run(capsys, *command, "--db", str(db))


SHORT = {
    "train.steps": 1, "train.eval.every": 0, "rollout.group_size": 2, "rollout.prompts_per_step": 1,
    "rollout.max_turns": 1, "rollout.max_new_tokens": 4,
}  # fmt: skip
GRADED = (
    "async def graded(episode, ctx):\n"
    "    return (await ctx.grade('def f(): return 1', [{'call': 'f', 'expect': 1}])).score\n"
)


def test_commands_that_run_code_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "code-task", str(tmp_path / "p"), "--min-level", "bare"]) == 0
    project = [
        "--project",
        str(tmp_path / "p"),
        "--set",
        "sandbox.backend=bare",
        "--set",
        "sandbox.workers=1",
    ]
    commands: dict[str, list[str]] = {
        "rollout": ["--model", "scripted", "-n", "1"],
        "eval": [
            "--checkpoint",
            "base",
            "--compare-to",
            "none",
            "--set",
            "model.name=scripted",
            "--limit",
            "1",
        ],
        "check": ["code-task"],
        "tools": ["call", "run_python", '{"code": "1"}'],
        "train": [part for name, value in SHORT.items() for part in ("--set", f"{name}={value}")],
        "rescore": ["last", "--reward", f"{tmp_path / 'p' / 'mine.py'}:graded"],
    }
    (tmp_path / "p" / "mine.py").write_text(GRADED)
    for name, more in commands.items():
        capsys.readouterr()
        main([name, *more, *project])
        assert "WARNING: Sandbox level bare isolates NOTHING" in capsys.readouterr().err, name


class Naked(Process):
    """A backend of a project's own that isolates nothing."""

    level = "bare"


def test_what_is_refused_is_not_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os\nprint(os.getuid())")
    run = ["sandbox", "run", str(program), "--set", "sandbox.backend=bare"]
    assert main(run) == 3
    refused = capsys.readouterr().err
    assert "weaker than sandbox.min_level ns" in refused and "WARNING" not in refused
    for backend in ("bare", f"{__name__}:Naked"):
        accepted = [*run[:-1], f"sandbox.backend={backend}", "--set", "sandbox.min_level=bare"]
        assert main(accepted) == 0
        output = capsys.readouterr()
        who = "runs as an ordinary user of this machine" if os.geteuid() == 0 else "runs as you"
        assert who in output.err and (int(output.out) == os.getuid()) == (os.geteuid() != 0)


async def test_a_chat_and_a_what_if_warn_too() -> None:
    sandbox, note = await _sandbox(NAKED.sandbox, PACK)
    assert sandbox is not None
    await sandbox.close()
    event = {
        "ev": "ready",
        "model": "m",
        "weights": "",
        "context": 1,
        "tools": [],
        "sandbox": "bare",
        "note": note,
    }
    assert any("isolates NOTHING" in line.plain for line in ready_lines(event))
    assert "isolates NOTHING" in event_lines(event)[0].plain


async def in_code(code: str, ctx: ToolContext) -> str:
    """A user's own tool, which returns a text."""
    result: ExecResult = await (await ctx.session()).run(code)
    if not result.ok:
        raise ValueError(result.text())
    return result.stdout


async def apart_from_it(ctx: ToolContext) -> str:
    """One that uses no sandbox."""
    return "2"


async def test_every_call_that_used_a_sandbox_knows_its_level() -> None:
    async with await open_sandbox() as sandbox:
        ctx = ToolContext(session_factory=sandbox.session)
        own, other, sleepy = as_tool(in_code), as_tool(apart_from_it), as_tool(in_code)
        sleepy.timeout = 0.2
        given = [
            (own, {"code": "print(1)"}),
            (own, {"code": "1 / 0"}),
            (sleepy, {"code": "while True: pass"}),
        ]
        results = await asyncio.gather(
            *(tool.call(ctx, arguments) for tool, arguments in [*given, (other, {})])
        )
        await ctx.close()
    assert [result.error for result in results] == [None, "exception", "timeout", None]
    assert [result.level for result in results] == [sandbox.level] * 3 + [""]
