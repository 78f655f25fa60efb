"""Replay of episodes whose turns branch: the tree, one branch alone, and the same printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.store import Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.common.episode_view import fork_of, make_view, whatif_turn
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.common.tree import fork_depths, indentation, spans
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.types import ROOT, Origin, ToolResult
from tests.helpers import tui_demo as demo
from tests.helpers.trees import chain, episode, fork, sub_agent, three_leaves
from tests.helpers.tui import until, until_text, visible


def tree(words: demo.Words) -> demo.Writer:
    """An agent that asks a second one, and whose history was then cut after its first call."""
    w = demo.Writer(words, 1)
    w.given("user", "Ask the expert for the price.", Origin.USER)
    w.assistant("I ask the expert.", [demo.call("ask", {"question": "price?"})])
    w.given("user", "You are the expert: what is the price?", Origin.USER)
    w.turns[-1] = replace(w.turns[-1], parent=ROOT)
    w.assistant("The price is 54.")
    w.given("tool", "54", Origin.TOOL, [ToolResult("54")])
    w.turns[-1] = replace(w.turns[-1], parent=1)
    w.assistant("It costs 54.")
    w.given("tool", "an older answer", Origin.TOOL, [ToolResult("an older answer")])
    w.turns[-1] = replace(w.turns[-1], parent=1)
    w.assistant("It costs 12.")
    return w


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trees") / "agentrl.db"
    run = demo.fill(path)
    words = demo.Words()
    w = tree(words)
    plain = demo.episode(words, 1, solved=True)
    one = plain.with_(id="tree", group_id=None, run_id=run, turns=tuple(w.turns), tokens=w.tokens())
    with Store.open(path) as store:
        store.tokenizers.add("tree-tokenizer", words.json(), "", {})
        store.episodes.add([one], tokenizer="tree-tokenizer")
        store.signals.add("tree", demo.signals_of(one))
    return path


def test_the_tree_of_turns_by_hand() -> None:
    assert fork_depths(episode(chain()).parents) == [0] * 6
    assert fork_depths(episode(fork()).parents) == [0, 0, 0, 0, 1, 1]
    assert fork_depths(episode(sub_agent()).parents) == [0, 0, 1, 1, 0, 0]
    assert list(indentation(episode(three_leaves())).values()) == ["", "", "", "", "└", " ", "└"]
    assert spans([0, 1, 2, 4, 6, 7]) == "0-2 4 6-7"


async def test_replay_shows_the_tree_and_each_branch_alone(db: Path) -> None:
    app = AgentApp(db, lambda reader: ReplayScreen(reader, "tree"))
    async with app.run_test(notifications=True, size=(120, 40)) as pilot:
        text = await until_text(pilot, "3 branches")
        assert (
            "> 1 asst +tool" in text
            and "  2 └user" in text
            and "  4 tool" in text
            and "  6 └tool" in text
        )
        assert (
            "TURN 2/7 user  another context" in text and "TURN 4/7 tool  continues turn 1" in text
        )
        screen = app.screen
        assert isinstance(screen, ReplayScreen)
        await pilot.press("B")
        text = await until_text(pilot, "BRANCH 1 of 3: turns 2-3")
        assert "the expert: what is the price" in text and "It costs 54" not in text
        await pilot.press("B")
        text = await until_text(pilot, "BRANCH 2 of 3: turns 0-1 4-5")
        assert "It costs 54" in text and "It costs 12" not in text and "▸ TURN 3/7" in text
        await pilot.press("B")
        text = await until_text(pilot, "BRANCH 3 of 3: turns 0-1 6-7")
        assert "It costs 12" in text and "It costs 54" not in text
        block = screen.tokens.view.blocks[6] if screen.tokens.view is not None else None
        assert (
            block is not None and screen.tokens.cursor == block.start
        )  # the first token that is the branch's own
        await pilot.press("B")
        await until(pilot, lambda: "BRANCH" not in visible(app))
        assert "It costs 54" in visible(app)


async def test_an_episode_of_one_branch_has_no_other_to_show(db: Path) -> None:
    app = AgentApp(db, lambda reader: ReplayScreen(reader, "ep0120003"))
    async with app.run_test(notifications=True, size=(120, 40)) as pilot:
        text = await until_text(pilot, "> 2 asst +tool")
        assert "branches" not in text
        await pilot.press("B")
        await until_text(pilot, "This episode has one branch.")


def test_printed_and_as_json(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "tree", "--plain", "--db", str(db)]) == 0
    text = capfd.readouterr().out
    assert (
        "--- TURN 6/7 tool  continues turn 1" in text
        and "3 branches, B: turns 2-3, 0-1 4-5, 0-1 6-7" in text
    )
    assert main(["replay", "tree", "--json", "--db", str(db)]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["branches"] == [[2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]
    assert [turn["parent"] for turn in shown["turns"]] == [None, None, -1, None, 1, None, 1, None]
    assert main(["show", "tree", "--db", str(db)]) == 0
    text = capfd.readouterr().out
    assert "branches 2-3, 0-1 4-5, 0-1 6-7" in text and "── turn 4 tool ── continues turn 1" in text


def test_what_if_and_forks_follow_the_path(db: Path) -> None:
    one = episode(fork())
    view = make_view(one, TokenTexts())
    at = {turn.index: turn.start for turn in one.turns}
    assert [whatif_turn(view, at[n]) for n in (0, 1, 2, 4)] == [1, 1, 3, 5]
    assert (
        whatif_turn(make_view(episode(sub_agent()), TokenTexts()), 7) == 3
    )  # of the second agent, not the first
    # main branches: 0-1 4-5 here; the other says 26 for 25 there
    other = episode([*fork()[:5], replace(fork()[5], ids=(26,))], "other")
    found = fork_of(view, other)
    assert (
        found is not None
        and found.position == one.turns[5].start
        and one.tokens.ids[found.position] == 25
    )
