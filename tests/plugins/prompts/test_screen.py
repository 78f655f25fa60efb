"""The screen of a prompt optimisation."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl_cli.commands import app
from agentrl_cli.plugins.prompts.candidates import load_candidates
from agentrl_cli.plugins.prompts.screen import PromptsScreen
from agentrl_cli.plugins.prompts.store import PromptRow, Prompts
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import RunsScreen
from tests.helpers import tui_demo as demo
from tests.helpers.tui import until, until_text


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
async def test_the_candidates_of_a_search(tmp_path: Path, size: tuple[int, int]) -> None:
    db = tmp_path / "agentrl.db"
    words = demo.Words()
    with Store.open(db) as store:
        run = store.runs.add(RunRow("opt", "optimize-01", kind="optimize", status="finished"))
        store.journal.add_event(run.id, "optimize", {"budget": 40})
        for n, (name, parent, text) in enumerate(
            (("aaaa", None, "Answer."), ("bbbb", "aaaa", "Answer briefly."))
        ):
            Prompts(store).add(
                PromptRow(run.id, name, parent, "gepa" if parent else "seed", {"system": text})
            )
            each = demo.episode(words, n + 1, solved=bool(n), run_id=run.id)
            store.episodes.finish(each.with_(id=f"ep{name}", kind="eval", group_id=f"{name}/t"))
            store.marks.tag(f"ep{name}", f"prompt:{name}")
            Prompts(store).score(run.id, name, "validation", 0.25 + n / 2, n + 1)
        found = load_candidates(store, "opt")
        assert [(row.id, depth) for row, depth in found.rows] == [("aaaa", 0), ("bbbb", 1)]
        assert (found.best, found.spent, found.points) == ("bbbb", 2, ((1, 0.25), (2, 0.75)))
    plain = (
        CliRunner()
        .invoke(app, ["optimize", "--show", "optimize-01", "--db", str(db)], catch_exceptions=False)
        .stdout
    )
    shown = plain.splitlines()
    assert (
        "2/40 episodes" in shown[0]
        and shown[3].startswith(" ★gepa  0.750")
        and shown[3].endswith("└ bbbb")
    )
    assert shown[1].index("candidate") == shown[2].index("aaaa") and shown[-2:] == [
        "- Answer.",
        "+ Answer briefly.",
    ]
    async with AgentApp(db, RunsScreen).run_test(size=size) as pilot:
        await until_text(pilot, "optimize-01")
        await pilot.press("enter")
        text = await until_text(pilot, "+ Answer briefly.")
        assert (
            "2/40 episodes" in text and "└ bbbb" in text and "- Answer." in text and "0.750" in text
        )
        with Store.open(db) as store:
            Prompts(store).add(
                PromptRow(run.id, "cccc", "bbbb", "gepa", {"system": "Answer at length."})
            )
        await until_text(pilot, "cccc")
        await pilot.press("k", "space", "j", "j")
        await until_text(pilot, "DIFF aaaa -> cccc")
        screen = pilot.app.screen
        assert isinstance(screen, PromptsScreen)
        await pilot.press("k", "enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, ReplayScreen))
