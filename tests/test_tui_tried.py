"""What trying the screens in a real terminal showed: each was a fault once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl_cli.steering import CHANGEABLE
from agentrl_cli.store import Store
from agentrl_cli.store.html import PAGE
from agentrl_cli.tui import demo
from agentrl_cli.tui.layers import LAYERS
from agentrl_cli.tui.watch import KNOBS
from agentrl_cli.tui.watch_data import load
from agentrl_cli.tui.watch_panels import now_lines
from agentrl_cli.types import AgentState, Fact, Outcome, RewardPart

WIDE, SMALL = (120, 40), (80, 24)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """The invented run, whose process is this one, so that it counts as alive."""
    path = tmp_path / "agentrl.db"
    demo.fill(path, steps=40)
    return path


def test_the_page_has_every_layer_of_the_screen_in_its_order_and_no_colour_without_a_mark() -> None:
    text = PAGE.read_text("utf-8")
    table = text[text.index("const LAYERS = {") : text.index("const el = ")]
    assert re.findall(r"^  (\w+): \[", table, re.M) == list(LAYERS)
    assert all(f'"{layer.title}"' in table for layer in LAYERS.values())
    marks = re.findall(r"^\.c\d \{ background: [^;]+; text-decoration: ([^;]+);", text, re.M)
    assert len(marks) == len(set(marks)) == 9


def test_the_knobs_are_those_that_the_trainer_takes() -> None:
    assert set(KNOBS) == set(CHANGEABLE)


def test_an_evaluation_is_not_taken_for_the_next_step(db: Path) -> None:
    with Store.open(db) as store:
        going = store.episode("ep_live").with_(id="ev1", kind="eval", task_id="calc/test-1", step=40, group_id="ge")
        store.finish_episode(going.with_(id="ev0", outcome=Outcome.FAILED, reward_parts=(RewardPart("r", -3.0),)))
        store.start_episode(going)
        store.set_live("ev1", AgentState.GENERATING, 1, "")
        store.finish_episode(store.episode("ep_live").with_(outcome=Outcome.FAILED))
        flat = store.episode("ep0040002").with_(id="flat", advantage=None, fact=Fact.SKIPPED_ZERO_VARIANCE, step=41)
        store.finish_episode(flat)
        data = load(store, "run7")
    assert data.evaluating and data.done == 1
    assert now_lines(data, 80, 4, 0)[0].plain == "NOW EVALUATION after step 40: 1 done, 1 run"
    assert {row.kind for _, row in data.notable} == {"train"}  # of the step itself, not of what judges it
    assert 0.0 in data.advantages  # a group without spread: no advantage was stored, and it teaches nothing
