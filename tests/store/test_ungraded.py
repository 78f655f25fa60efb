"""What was not graded has no reward: NULL in the store, in views, filters, orders, lists and exports, and never 0."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_cli.reports.export import export_lines
from agentrl_cli.store import RunRow, Score, Store
from agentrl_cli.store.connection import connect
from agentrl_cli.store.schema import MIGRATIONS
from agentrl_cli.trainer.metrics import step_metrics
from agentrl_cli.tui.common.episode_view import contrasting_sibling
from agentrl_cli.tui.common.reader import load_view
from agentrl_cli.types import Episode, Fact, Origin, Outcome, RewardPart, Tokens, Turn
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


EPISODES = [
    episode_of("good", Outcome.SOLVED, 1.0, 0),
    episode_of("bad", Outcome.FAILED, 0.0, 1),
    *(episode_of(str(outcome), outcome, None, 2 + n) for n, outcome in enumerate(ERRORS)),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "agentrl.db") as opened:
        opened.runs.add(RunRow(id="r1", name="run"))
        opened.episodes.add(EPISODES)
        yield opened


def listed(store: Store, filter: str = "", sort: str = "time") -> list[str]:
    return [row.id for row in store.episodes.rows(store.episodes.ids(filter, sort))]


def test_rows_views_filters_and_orders_leave_them_out(store: Store) -> None:
    ungraded = [episode.id for episode in EPISODES[2:]]
    assert {row.id: row.reward for row in store.episodes.rows(store.episodes.ids())} == {
        "good": 1.0, "bad": 0.0, **dict.fromkeys(ungraded),
    }  # fmt: skip
    assert listed(store, "reward:<0.1") == ["bad"] and listed(store, "reward:none") == ungraded
    assert listed(store, "-reward:none") == ["good", "bad"]
    for sort, first in (("reward", ["bad", "good"]), ("-reward", ["good", "bad"])):
        assert listed(store, "", sort)[:2] == first and set(listed(store, "", sort)[2:]) == set(
            ungraded
        )
    ask = store.conn.execute
    (group,) = ask("SELECT episodes, graded, mean, sd, solved, has_signal FROM v_groups").fetchall()
    assert group == (len(EPISODES), 2, 0.5, 0.5, 0.5, 1)
    assert ask("SELECT avg(reward), count(reward) FROM v_episodes").fetchone() == (0.5, 2)
    assert store.stats.group("g", "r1") == (2, 0.5, 0.5)
    (task,) = store.stats.tasks()
    assert task[4:] == (len(EPISODES), 0.5, 0.5)


def test_read_back_shown_exported_and_measured(store: Store, cli: Cli) -> None:
    wanted = [1.0, 0.0] + [None] * len(ERRORS)
    assert (
        [store.episodes.get(e.id).reward for e in EPISODES]
        == [e.reward for e in EPISODES]
        == wanted
    )
    lines = [json.loads(line) for line in export_lines(store, [e.id for e in EPISODES])]
    assert [line["reward"] for line in lines] == [e.reward for e in EPISODES]
    view = load_view(store, "timeout")
    assert [row.reward for row in view.siblings] == [1.0, 0.0] + [None] * len(ERRORS)
    assert contrasting_sibling(view) is not None
    metrics = step_metrics([EPISODES], dict.fromkeys((e.id for e in EPISODES), Fact.TRAINED))
    assert (metrics["reward"], metrics["solved"]) == (0.5, 0.5)
    store.flush()
    assert "reward -" in cli("show", "timeout", "--db", str(store.path))
    shown = cli.json("ls", "--sort", "reward", "--db", str(store.path))
    assert [row["reward"] for row in shown] == [0.0, 1.0] + [None] * len(ERRORS)


def test_a_store_of_before_is_set_right_by_outcome(tmp_path: Path) -> None:
    path = tmp_path / "agentrl.db"
    with Store.open(path) as store:
        store.runs.add(RunRow(id="r1", name="run"))
        store.episodes.add([*EPISODES, episode_of("odd", Outcome.TRUNCATED_TOKENS, -1.0, 20)])
        store.episodes.start(Episode("running", "t", run_id="r1"))
        scores = [Score("s", name, 0.5, 0.5, None, "trained", {}) for name in ("good", "timeout")]
        store.scores.add("r1", "s", scores, {})
    conn = sqlite3.connect(path)
    conn.execute("UPDATE runs SET claim=''")  # the process that wrote it has ended
    before = [name for name, _ in MIGRATIONS].index("m010_ungraded")
    conn.execute("UPDATE episodes SET reward=0.0 WHERE reward IS NULL AND outcome IS NOT NULL")
    conn.execute("DELETE FROM _sqlite_migrations WHERE name='m010_ungraded'")
    conn.execute(f"PRAGMA user_version={before}")
    conn.commit()
    conn.close()
    connect(path).close()
    with Store.open(path, readonly=True) as store:
        rewards = {row.id: row.reward for row in store.episodes.rows(store.episodes.ids())}
        assert {name for name, reward in rewards.items() if reward is not None} == {
            "good",
            "bad",
            "odd",
        }
        assert (rewards["bad"], rewards["odd"], rewards["running"]) == (0.0, -1.0, None)
        assert [score.reward for score in store.scores.get("good")] == [0.5] and store.scores.get(
            "timeout"
        ) == []
        assert store.conn.execute("SELECT graded FROM v_groups").fetchall() == [(3,)]
