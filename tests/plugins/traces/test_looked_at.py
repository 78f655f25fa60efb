"""Commands that look at imported episodes, which no model of this store sampled, say so."""

import json
import re
from pathlib import Path

import pytest

from agentrl_cli.errors import NotFound
from agentrl_cli.plugins.traces.load import load
from agentrl_cli.sft.from_store import choose
from agentrl_cli.store import Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.replay.screen import ReplayScreen
from tests.helpers.cli import Cli
from tests.helpers.tui import until_text
from tests.plugins.traces.test_atif import ASK, CALL, agent_of


@pytest.fixture
def imported(cli: Cli, tmp_path: Path) -> Cli:
    """A run of an import: one solved, one failed, one without a score."""
    call = {"id": "c", "function": {"name": "look", "arguments": {"q": 1}}}
    said = [
        {"role": "user", "content": "What is it?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Let me see.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    rows = []
    for number, score in enumerate((1, 0, None)):
        answer = {"role": "assistant", "content": f"It is {4 + number}."}
        rows.append({"messages": [*said, answer]} | ({} if score is None else {"score": score}))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cli("import", "otlp", "rows.jsonl", "--db", "a.db")
    cli.always = ("--db", "a.db")
    return cli


def test_what_is_left_out_is_said(imported: Cli, tmp_path: Path) -> None:
    text = imported("failures")
    assert "1 of 2 attempts (import) failed" in text and "--whatif" not in text and "@t" in text
    left = "are left out: no model of this store sampled their tokens (imported)."
    imported("export", "--format", "sequences", "-o", "x.jsonl", said=f"3 of 3 episodes {left}")
    lines: list[str] = []
    with Store.open(tmp_path / "a.db") as store, pytest.raises(NotFound):
        choose(store, "run:rows", "", narrate=lines.append)
    assert lines == [f"2 of 2 episodes {left}"]
    imported("why", "rows", code=2, said="is of the kind import, not a training")


def test_what_cannot_run_again_is_said(imported: Cli) -> None:
    for words in (("--verify",), ("--whatif", "rerun")):
        imported("replay", "last", *words, code=2)
        assert "Nothing of this episode can run again" in imported.err
    imported("replay", "nosuch.json", code=2, said="No file named 'nosuch.json'")


async def test_the_screen_says_forced_and_shows_the_reasoning(
    imported: Cli, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        id = store.episodes.resolve("last")
    app = AgentApp(tmp_path / "a.db", lambda reader: ReplayScreen(reader, id))
    async with app.run_test(size=(120, 40)) as pilot:
        text = await until_text(pilot, "TURNS")
        assert "LAYER plain" in text  # nothing was sampled: no marks
        assert re.search(r"\dt forced", text) and not re.search(r"\dt sampled", text)
        await pilot.press("M")
        await until_text(pilot, "Let me see.")


async def test_the_reading_fits_a_small_terminal_and_names_sub_agents(tmp_path: Path) -> None:
    found = agent_of("lead", "root", [ASK, CALL])
    found["subagent_trajectories"] = [agent_of("helper", "sub", [{**ASK, "message": "Look."}])]
    (tmp_path / "t.json").write_text(json.dumps(found))
    with Store.open(tmp_path / "a.db") as store:
        [id], _ = load(tmp_path / "t.json", store)
    app = AgentApp(tmp_path / "a.db", lambda reader: ReplayScreen(reader, id))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_text(pilot, "TURN 1")
        await pilot.press("M")
        text = await until_text(pilot, "TURN 3 user   helper   another context")
        assert "? keys  q back" in text
