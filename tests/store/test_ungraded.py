"""What was not graded has no reward: NULL in the store, in views, filters, orders, lists and exports, and never 0."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentrl_cli.reports.export import export_lines
from agentrl_cli.store import RunRow, Score, Store
from agentrl_cli.store.connection import connect
from agentrl_cli.store.schema import MIGRATIONS
from agentrl_cli.trainer.metrics import step_metrics
from agentrl_cli.tui.common.episode_view import contrasting_sibling
from agentrl_cli.tui.common.reader import load_view
from agentrl_cli.types import (
    Episode,
    Fact,
    Origin,
    Outcome,
    RewardPart,
    Tokens,
    Turn,
)
from tests.helpers.cli import Cli

ERRORS = [outcome for outcome in Outcome if outcome.is_error or outcome is Outcome.TOO_LONG]


def episode_of(name: str, outcome: Outcome, reward: float | None, sample: int) -> Episode:
    tokens = Tokens.from_ids([1, 2], [int(Origin.USER), int(Origin.MODEL)])
    parts = () if reward is None else (RewardPart("r", reward, primary=True),)
    turn = Turn(0, "assistant", ({"role": "assistant", "content": name},), 0, 2)
    return Episode(
        name, "t", "p", run_id="r1", step=1, group_id="g", sample=sample, kind="train", turns=(turn,), tokens=tokens,
        reward_parts=parts, outcome=outcome, started=1.0 + sample, ended=3.0 + sample,
    )  # fmt: skip


GRADED = [
    episode_of("good", Outcome.SOLVED, 1.0, 0),
    episode_of("bad", Outcome.FAILED, 0.0, 1),
    *(episode_of(str(outcome), outcome, None, 2 + n) for n, outcome in enumerate(ERRORS)),
]


@pytest.fixture
def graded(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "agentrl.db") as opened:
        opened.runs.add(RunRow(id="r1", name="run"))
        opened.episodes.add(GRADED)
        yield opened


def listed(store: Store, filter: str = "", sort: str = "time") -> list[str]:
    return [row.id for row in store.episodes.rows(store.episodes.ids(filter, sort))]


def test_rows_views_filters_and_orders_leave_them_out(graded: Store) -> None:
    ungraded = [episode.id for episode in GRADED[2:]]
    rewards = {row.id: row.reward for row in graded.episodes.rows(graded.episodes.ids())}
    assert rewards == {"good": 1.0, "bad": 0.0, **dict.fromkeys(ungraded)}
    found = {said: listed(graded, said) for said in ("reward:<0.1", "reward:none", "-reward:none")}
    assert [*found.values()] == [["bad"], ungraded, ["good", "bad"]]
    for sort, first in (("reward", ["bad", "good"]), ("-reward", ["good", "bad"])):
        order = listed(graded, "", sort)
        assert order[:2] == first and set(order[2:]) == set(ungraded)
    sql = "SELECT episodes, graded, mean, sd, solved, has_signal FROM v_groups"
    assert graded.select(sql) == [(len(GRADED), 2, 0.5, 0.5, 0.5, 1)]
    assert graded.select("SELECT avg(reward), count(reward) FROM v_episodes") == [(0.5, 2)]
    assert graded.stats.group("g", "r1") == (2, 0.5, 0.5)
    assert [task[4:] for task in graded.stats.tasks()] == [(len(GRADED), 0.5, 0.5)]
    graded.marks.retire("r1", "g", ["bad"], Fact.SKIPPED_CUT)  # the cancelled one leaves, too
    assert [task[4:] for task in graded.stats.tasks()] == [(len(GRADED) - 2, 1.0, 1.0)]


def test_read_back_shown_exported_and_measured(graded: Store, cli: Cli) -> None:
    wanted, ids = [1.0, 0.0] + [None] * len(ERRORS), [e.id for e in GRADED]
    assert [graded.episodes.get(id_).reward for id_ in ids] == wanted
    assert [e.reward for e in GRADED] == wanted
    assert [json.loads(line)["reward"] for line in export_lines(graded, ids)] == wanted
    view = load_view(graded, "timeout")
    assert [row.reward for row in view.siblings] == wanted
    assert contrasting_sibling(view) is not None
    metrics = step_metrics([GRADED], dict.fromkeys(ids, Fact.TRAINED))
    assert (metrics["reward"], metrics["solved"]) == (0.5, 0.5)
    graded.flush()
    assert "reward -" in cli("show", "timeout", "--db", str(graded.path))
    shown = cli.json("ls", "--sort", "reward", "--db", str(graded.path))
    assert [row["reward"] for row in shown] == [0.0, 1.0] + [None] * len(ERRORS)


def test_a_store_of_before_is_set_right_by_outcome(tmp_path: Path) -> None:
    path, before = tmp_path / "agentrl.db", [name for name, _ in MIGRATIONS].index("m010_ungraded")
    with Store.open(path) as store:
        store.runs.add(RunRow(id="r1", name="run"))
        store.episodes.add([*GRADED, episode_of("odd", Outcome.TRUNCATED_TOKENS, -1.0, 20)])
        store.episodes.start(Episode("running", "t", run_id="r1"))
        scores = [Score("s", name, 0.5, 0.5, None, "trained", {}) for name in ("good", "timeout")]
        store.scores.add("r1", "s", scores, {})
    with closing(sqlite3.connect(path)) as conn, conn:
        for sql in (
            "UPDATE runs SET claim=''",  # the process that wrote it has ended
            "UPDATE episodes SET reward=0.0 WHERE reward IS NULL AND outcome IS NOT NULL",
            "DELETE FROM _sqlite_migrations WHERE name='m010_ungraded'",
            f"PRAGMA user_version={before}",
        ):
            conn.execute(sql)
    connect(path).close()
    with Store.open(path, readonly=True) as store:
        rewards = {row.id: row.reward for row in store.episodes.rows(store.episodes.ids())}
        none = dict.fromkeys(["running", *map(str, ERRORS)])
        assert rewards == {"good": 1.0, "bad": 0.0, "odd": -1.0, **none}
        assert [score.reward for score in store.scores.get("good")] == [0.5]
        assert store.scores.get("timeout") == []
        assert store.select("SELECT graded FROM v_groups") == [(3,)]
