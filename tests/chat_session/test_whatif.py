"""What-if: recorded calls run again, rewards computed again, continuing from a turn, children in the store."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from agentrl_cli import Tokenizer, ToolEnv, load_pack
from agentrl_cli.chat_session.child import parse
from agentrl_cli.chat_session.open import nearest_checkpoint, open_past
from agentrl_cli.chat_session.rerun import (
    advantages,
    chain_to,
    compare_worlds,
    rerun_calls,
    same_answer,
)
from agentrl_cli.chat_session.whatif import ARGUMENTS, child_object, rerun_object
from agentrl_cli.commands import main
from agentrl_cli.errors import UsageError
from agentrl_cli.paths import bundled_model
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tools import as_tool
from agentrl_cli.tools.sql import SqlTool
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.chat.screen import ChatScreen
from agentrl_cli.tui.chat.transcript import ChatLine
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.whatif.screen import WhatIfScreen
from agentrl_cli.tui.whatif.view import event_lines, whatif_arguments
from agentrl_cli.types import (
    Episode,
    Outcome,
    RewardPart,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Turn,
)
from tests.chat_session.test_golden import fill
from tests.helpers.sandbox import open_sandbox
from tests.helpers.session import scripted, what_if
from tests.helpers.trees import grafted
from tests.helpers.tui import press, screen_of, showing, until, until_text, visible
from tests.tui.test_chat import serve

PACK = load_pack("calc-task")
ROW, TASK = next(
    (row, task)
    for row, task in enumerate(PACK.tasks("train"))
    if PACK.solution(task)[0].get("tool_calls")
)


def solution() -> list[str]:
    texts = []
    for message in PACK.solution(TASK):
        if message["role"] == "assistant":
            calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
            texts.append(
                message["content"] + "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            )
    return texts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("whatif")
    return folder / "a.db", asyncio.run(fill(folder, PACK, ROW, *solution()))


@pytest.mark.parametrize(
    ("step", "weights", "nearest"),
    [
        (1, "tiny", None),
        (2, "made@1", 2),
        (7, "made@6", 6),
        (9, "made@8", 6),
        (15, "made@14", 12),
        (5, "old@4", 4),
    ],
)
def test_a_what_if_continues_with_the_checkpoint_nearest_to_the_episode(
    tmp_path: Path, step: int, weights: str, nearest: int | None
) -> None:
    """Never with one that the episode has trained; `old` is the run's name before it was renamed."""
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow("r1", "made"))
        evaluation = store.runs.add(
            RunRow("r2", "eval-made", "eval", parent_id="r1", parent_step=4)
        )
        for at in (2, 4, 6, 12):
            (tmp_path / str(at)).mkdir()
            store.runs.add_checkpoint(run.id, at, tmp_path / str(at), {}, "step")
        store.runs.add_checkpoint(run.id, 7, tmp_path / "deleted", {}, "step")
        kept: dict[str, Any] = {"outcome": Outcome.FAILED}
        store.episodes.add(
            [Episode("e1", "t/1", run_id=run.id, step=step, weights_version=weights, **kept)]
        )
        store.episodes.add(
            [Episode("e2", "t/1", run_id=evaluation.id, weights_version="made@best", **kept)]
        )
        store.episodes.add([Episode("e3", "t/1", weights_version="tiny", **kept)])
        assert nearest_checkpoint(store, store.episodes.row("e1")) == (
            nearest and f"made@{nearest}"
        )
        assert nearest_checkpoint(store, store.episodes.row("e2")) == "made@4"
        assert nearest_checkpoint(store, store.episodes.row("e3")) is None
        rollout = store.runs.add(RunRow("r3", "tried", "rollout"))
        for version, wanted in (
            ("made@last", "made@12"),
            ("made@4", "made@4"),
            ("made@7", None),
            ("made@base", "made@base"),
            ("mad@4", None),
            ("old@4", None),
            ("./b@4", None),
        ):
            again = {"run_id": rollout.id, "weights_version": version, **kept}
            store.episodes.add([Episode(version, "t/1", **again)])
            assert nearest_checkpoint(store, store.episodes.row(version)) == wanted
        store.episodes.add(
            [Episode("e4", "t/1", **again | {"weights_version": "made@4"}, started=0.5)]
        )
        early = "a run of this name was deleted, and this one began later"
        assert nearest_checkpoint(store, store.episodes.row("e4")) is None, early


async def test_a_what_if_says_whose_weights_continue(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    db, episode = made
    copy = tmp_path / "a.db"
    copy.write_bytes(db.read_bytes())
    with Store.open(copy) as store, store.transaction() as conn:
        store.runs.add_checkpoint("r1", 1, bundled_model(), {}, "step")
        conn.execute("UPDATE episodes SET weights_version='made@1'")
    code, events = await what_if(copy, episode, "--turn", "2")
    assert code == 0 and events[0]["model"] == "made@1" == events[0]["sampled_by"]
    assert "made@1" in event_lines(events[0])[0].plain
    other = event_lines({**events[0], "sampled_by": "made@0"})[0].plain
    assert other.endswith("; the episode was sampled by made@0")


async def test_parts_of_the_length_and_of_hooks_stay_in_the_reward(tmp_path: Path) -> None:
    first = await fill(tmp_path, PACK, ROW, *solution())
    shaped = RewardPart("length_penalty", -0.5, 0.2, detail="60 sampled tokens")
    with Store.open(tmp_path / "a.db") as store:
        episode, row = store.episodes.get(first), store.episodes.row(first)
        parts = (*episode.reward_parts, shaped)
        copied = episode.with_(id="c" * 14, sample=2, reward_parts=parts)
        store.episodes.add([copied], split=row.split, tokenizer=row.tokenizer)
    _, events = await what_if(tmp_path / "a.db", "c" * 14, "--rerun")
    (found,) = [event for event in events if event["ev"] == "rewards"]
    assert found["total_before"] == found["total_after"] == 1.0
    assert not found["episode"], "nothing is stored as scored again"
    assert [part["name"] for part in found["after"]][-1] == "length_penalty"


async def test_verifying_says_where_it_diverged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = tmp_path / "a.db"
    episode = await fill(tmp_path, PACK, ROW, *solution())
    command = ["replay", episode, "--verify", "--db", str(db)]
    assert await asyncio.to_thread(main, command) == 0
    seen = capsys.readouterr()
    assert (
        "same" in seen.out and "REWARD" not in seen.out and "calls answer as recorded" in seen.err
    )
    with Store.open(db) as store, store.transaction() as conn:
        conn.execute(
            "UPDATE tool_calls SET result='something else' WHERE episode_id=? AND turn=2",
            (episode,),
        )
    assert await asyncio.to_thread(main, command) == 1
    seen = capsys.readouterr()
    assert "diverged at call 1" in seen.out and "-something else" in seen.out and "1 of" in seen.err
    with Store.open(db, readonly=True) as store:
        assert len(store.episodes.ids()) == 2
    given = ["--turn", "4", "--samples", "2", *scripted(tmp_path, "It is 3.")]
    _, events = await what_if(db, episode, *given)
    diverged = [event for event in events if event["ev"] == "diverged"]
    assert [(event["call"], event["turn"]) for event in diverged] == [(1, 2)]
    assert "diverged at call 1" in event_lines(diverged[0])[0].plain
    born = [event["episode"] for event in events if event["ev"] == "child"]
    assert len(born) == 2
    for one in born:  # the second sample continues in the first one's world, and is marked, too
        with Store.open(db, readonly=True) as store:
            assert "DIVERGED" in store.episodes.row(one).flags
        for command, said in (
            (["show"], "diverged at call 1 ("),
            (["replay", "--plain"], "DIVERGED diverged at call 1"),
        ):
            assert await asyncio.to_thread(main, [*command, one, "--db", str(db)]) == 0
            assert said in capsys.readouterr().out


async def test_a_reroll_of_a_branch_continues_its_path(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    db, episode = made
    with Store.open(db) as store:
        parent = store.episodes.get(episode)
        tree = grafted(parent, parent, 2).with_(id="tree", kind="rollout", group_id=None)
        store.episodes.add([tree], tokenizer=Tokenizer.load(bundled_model()).hash)
    turn = len(parent.turns)
    given = [
        "--turn",
        str(turn + 2),
        "--samples",
        "1",
        *scripted(tmp_path, "It is 3."),
    ]
    code, events = await what_if(db, "tree", *given)
    assert code == 0, events
    (made_,) = [event for event in events if event["ev"] == "child"]
    with Store.open(db, readonly=True) as store:
        row, kept = store.episodes.row(made_["episode"]), store.episodes.get(made_["episode"])
    assert (row.parent_id, row.parent_turn) == ("tree", turn + 2) and kept.linear
    before = parent.turns[4].start
    assert (
        kept.tokens.ids[:before].tolist() == parent.tokens.ids[:before].tolist()
        and len(kept.turns) == 5
    )
    chain, at, places = chain_to(tree, turn + 2)
    assert (at, places) == (4, (0, 1, *range(turn, len(tree.turns)))) and chain.linear
    code, events = await what_if(db, "tree", "--verify")
    assert code == 0 and all(event["same"] for event in events if event["ev"] == "rerun")


CUT = ToolResult("begin[… 9 tokens cut …]end", truncated=True)
BY_HAND = 0.5 / (0.5**0.5 + 1e-4)  # the sample standard deviation, as the trainer's
# A part of a what-if, what it is given, and its answer.
PARTS: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (whatif_arguments, ("rerun",), ["--rerun"]),
    (
        whatif_arguments,
        ("turn=2 n=4 T=0.7 model=a@best",),
        ["--turn", "2", "--samples", "4", "--temperature", "0.7", "--model", "a@best"],
    ),
    (whatif_arguments, (r"turn=2 edit=a\nb \\n = c",), ["--turn", "2", "--edit=a\nb \\n = c"]),
    # a cut answer is compared as far as it was kept
    (same_answer, (CUT, ToolResult("begin and much more until the end")), True),
    (same_answer, (CUT, ToolResult("another start, and the end")), False),
    (same_answer, (ToolResult("a"), ToolResult("a", error="timeout")), False),
    (advantages, ([1.0, 0.0],), pytest.approx([BY_HAND, -BY_HAND])),
    (advantages, ([2.0, 2.0],), [0.0, 0.0]),
    (advantages, ([],), []),
    # like headers of a diff
    (
        lambda *worlds: list(compare_worlds(*worlds)),
        ({"a": ["--x", "@@"]}, {"a": ["++y"]}),
        ["changed a", "---x", "-@@", "+++y"],
    ),
    (
        lambda *worlds: [*compare_worlds(*worlds)][21:],
        ({}, {"a": [str(n) for n in range(30)]}),
        ["… 10 more lines differ"],
    ),
]


@pytest.mark.parametrize(("function", "given", "wanted"), PARTS)
def test_parts_of_a_what_if(
    function: Callable[..., Any], given: tuple[Any, ...], wanted: Any
) -> None:
    assert function(*given) == wanted


@pytest.mark.parametrize(
    "wrong", ["n=4", "turn=2 n=four", "turn=2 n=0", "turn=x", "turn=²", "turn=1 tmp=2", "again"]
)
def test_a_request_that_cannot_be_read_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError):
        whatif_arguments(wrong)


async def test_replay_asks_and_shows_what_came_of_it_and_keys_scroll_it(
    made: tuple[Path, str],
) -> None:
    db, episode = made
    app = AgentApp(db, lambda reader: ReplayScreen(reader, episode))
    async with showing(app, "TOKEN 1/", notifications=True, size=(120, 40)) as pilot:
        assert "re-roll from turn 2" in await press(pilot, "R", then="run its tool calls again")
        await press(pilot, "1", then=lambda: "done" in visible(pilot.app).splitlines()[0])
        text = visible(pilot.app)
        assert "same" in text and "REWARD" in text and "advantage" in text
        screen = screen_of(pilot, WhatIfScreen)
        await pilot.resize_terminal(80, 12)
        screen.take({"ev": "fatal", "message": "late", "hint": "\n".join(map(str, range(30)))})
        await until(pilot, lambda: screen.page.max_scroll_y > 20)  # laid out: keys scroll by a page
        await press(pilot, "pagedown", then=lambda: screen.page.scroll_offset.y == 10)
        lost = {"ev": "child", **child_object(Episode("kept", "p/1"))}
        assert lost["text"] == "" and lost["reward"] is None
        for n in range(30):
            screen.take({**lost, "episode": f"kept{n:02}", "reward": None if n else 1.0})
        await until(pilot, lambda: screen.page.max_scroll_y > 50)
        await press(pilot, "pagedown", "pagedown", then="kept20")
        await press(pilot, *["pagedown"] * 2, then="0 of 30 solved, mean reward 1.00")
        await pilot.resize_terminal(120, 40)
        await press(pilot, "q", then="agentrl replay")
        await press(pilot, "c", then=lambda: isinstance(pilot.app.screen, ChatScreen))
        arguments = screen_of(pilot, ChatScreen).client.arguments
    assert arguments == ["--db", str(db), "--episode", episode, "--turn", "2"]
    _, (ready, *_) = await serve([], *arguments)
    assert ready["model"] == "tiny", "its run has no checkpoint yet"


async def test_a_what_if_has_the_texts_and_the_limits_of_its_run(tmp_path: Path) -> None:
    for name in ("run", "now"):
        (tmp_path / f"{name}.yaml").write_text(f"tools.calculator.description: Of {name}.\n")
    (tmp_path / "agentrl.yaml").write_text("task: {packs: [calc-task], prompts: now.yaml}\n")
    episode = await fill(tmp_path, PACK, ROW, *solution())
    words = ["--db", str(tmp_path / "a.db"), "--project", str(tmp_path), "--episode", episode]

    def shown() -> str:
        (tool,) = open_past(parse("whatif", ARGUMENTS, words)).pack.tools
        return str(tool.schema["function"]["description"])

    assert shown() == "Of now."  # its settings do not say
    with Store.open(tmp_path / "a.db") as store:
        config = store.runs.get("r1").config
        box = {**config["sandbox"], "min_level": "docker", "limits": {"wall": 9}}
        ran = {"task": {"prompts": "run.yaml"}, "sandbox": {**box, "imports": ["numpy"]}}
        store.runs.update("r1", config={**config, **ran})
    assert shown() == "Of run."
    sandbox = open_past(parse("whatif", ARGUMENTS, words)).config.sandbox
    assert (sandbox.limits.wall, sandbox.imports) == (9, ["numpy"])  # its code has the same room
    assert sandbox.min_level == "ns"  # which isolation there is depends on the machine


async def test_a_turn_of_many_lines_is_edited_as_it_is(made: tuple[Path, str]) -> None:
    db, episode = made
    app = AgentApp(db, lambda reader: ReplayScreen(reader, episode))
    async with showing(app, "TOKEN", notifications=True, size=(100, 30)) as pilot:
        await press(pilot, "R", then="re-roll from turn 2")
        await press(pilot, "3", then="ctrl+j: new line")
        line = pilot.app.screen.query_one(ChatLine)
        assert line.text == solution()[0]
        long = "the start " + "x" * 150 + " the end"
        line.put(f"-{long}\nand \\n a second")
        shown = await until_text(pilot, "the start")
        assert "the end" in shown and "and \\n a second" in shown
        settings = pilot.app.screen.query_one(Input)
        settings.value = "turn=2 seed=7"
        await pilot.press("tab")
        assert settings.has_focus
        await press(pilot, "enter", then="agentrl what if")
        given = parse("whatif", ARGUMENTS, screen_of(pilot, WhatIfScreen).client.arguments)
        assert (given.edit, given.turn, given.seed) == (f"-{long}\nand \\n a second", 2, 7)


# --- the effects of calls that are run again ---


def asks(index: int, *calls: tuple[str, dict[str, str]]) -> Turn:
    made = tuple(ToolCall(str(n), name, arguments, "") for n, (name, arguments) in enumerate(calls))
    return Turn(
        index,
        "assistant",
        ({"role": "assistant", "content": ""},),
        0,
        0,
        made,
        stop_reason=StopReason.STOP,
    )


async def test_a_call_run_again_shows_the_files_and_tables_that_it_changed() -> None:
    episode = Episode("e", "p/1", turns=(
        asks(0, ("bash", {"command": "printf 'one\\ntwo\\n' > notes.txt; touch tmp.txt"})),
        asks(1, ("bash", {"command": "sed -i s/two/2/ notes.txt; rm tmp.txt"})),
        asks(2, ("sql", {"query": "UPDATE fruit SET price = 3"})),
        asks(3, ("sql", {"query": "SELECT 1"})),
    ))  # fmt: skip
    async with await open_sandbox(workers=1) as sandbox:
        env = ToolEnv([as_tool("bash"), SqlTool(writable=True)], open_session=sandbox.session)
        await env.reset(
            Task(
                "p/1",
                "p",
                "",
                "train",
                (),
                data={
                    "database": "CREATE TABLE fruit (name, price); INSERT INTO fruit VALUES ('fig', 2);"
                },
            )
        )
        found = (await rerun_calls(episode, env, changes=True)).reruns
        await env.close()
    assert [one.changed for one in found] == [
        ("new notes.txt", "+one", "+two", "new tmp.txt"),
        ("changed notes.txt", "-two", "+2", "deleted tmp.txt"),
        ("changed table fruit", "-fig | 2", "+fig | 3"),
        (),
    ]
    event = {"ev": "rerun", **rerun_object(found[2])}
    assert "    changed table fruit" in [line.plain for line in event_lines(event, 80)]
    assert "changed" not in rerun_object(found[3])
