"""Episodes whose turns branch come back as they were, from the buffer and without it, and from an older file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl_cli.store import Store
from agentrl_cli.store.connection import connect
from agentrl_cli.store.schema import MIGRATIONS
from agentrl_cli.types import Episode, ToolCall, ToolResult, TrainSignals
from tests.helpers.trees import Said, chain, episode, fork, sub_agent, three_leaves

TREES = {"fork": fork(), "sub_agent": sub_agent(), "three_leaves": three_leaves(), "chain": chain()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "runs" / "agentrl.db") as opened:
        yield opened


def with_calls(said: list[Said], name: str) -> Episode:
    """Every assistant turn calls a tool named by its index, and every tool turn answers with its own."""
    one = episode(said, name)
    turns = []
    for turn in one.turns:
        if turn.role == "assistant":
            turn = replace(turn, calls=(ToolCall(f"c{turn.index}", f"tool{turn.index}", {}, "{}"),))
        if turn.role == "tool":
            turn = replace(turn, results=(ToolResult(f"answer {turn.index}"),))
        turns.append(turn)
    return one.with_(turns=tuple(turns))


def answered(store: Store, name: str) -> list[tuple[int, str]]:
    """(turn that asked, answer) of every stored result."""
    sql = "SELECT turn, result FROM tool_calls WHERE episode_id=? AND result IS NOT NULL ORDER BY result_turn"
    return [(int(turn), str(text)) for turn, text in store.db.execute(sql, (name,))]


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("shape", sorted(TREES))
def test_a_tree_comes_back_and_results_belong_to_the_calls_of_their_path(
    store: Store, shape: str, buffered: bool
) -> None:
    one = with_calls(TREES[shape], "e")
    if buffered:
        store.episodes.start(one)
        for turn in one.turns:
            store.episodes.add_turn(
                "e", turn, one.tokens.slice(turn.start, turn.end), later=turn.index % 2 == 0
            )
        store.episodes.finish(one)
    else:
        store.episodes.add([one])
    back = store.episodes.get("e")
    assert back.turns == one.turns and back.branches == one.branches
    assert back.tokens.ids.tolist() == one.tokens.ids.tolist()
    assert [b.trained.tolist() for b in back.sequences] == [
        b.trained.tolist() for b in one.sequences
    ]
    expected = {
        "fork": [(1, "answer 2"), (1, "answer 4")],
        "sub_agent": [(1, "answer 4")],
        "three_leaves": [],
        "chain": [(1, "answer 2"), (3, "answer 4")],
    }
    assert answered(store, "e") == expected[shape]


def test_signals_are_stored_with_the_turn_of_their_token(store: Store) -> None:
    one = episode(three_leaves())
    store.episodes.add([one])
    values = np.where(one.tokens.trained_mask, np.arange(len(one.tokens)), np.nan).astype(
        np.float32
    )
    clipped = np.zeros(len(values), np.int8)
    store.signals.add("e", TrainSignals(values, values, values, clipped, values))
    found = store.signals.get("e")
    assert found is not None and np.array_equal(found.weight, values, equal_nan=True)
    row = store.db.execute(
        "SELECT advantage FROM turn_tokens WHERE episode_id='e' AND idx=5"
    ).fetchone()
    assert np.frombuffer(row[0], "<f4").tolist() == [9.0, 10.0]


def test_branches_are_a_field_of_filters_and_parents_a_column_of_the_view(store: Store) -> None:
    store.episodes.add([episode(said, name) for name, said in TREES.items()])
    rows = store.episodes.rows(store.episodes.ids("branches:>1", "-branches"))
    assert rows[0].id == "three_leaves" and {row.id for row in rows} == set(TREES) - {"chain"}
    assert [row.id for row in store.episodes.rows(store.episodes.ids("branches:1"))] == ["chain"]
    parents = store.db.execute(
        "SELECT turn, parent FROM v_turns WHERE episode='sub_agent'"
    ).fetchall()
    assert parents == [(0, -1), (1, 0), (2, -1), (3, 2), (4, 1), (5, 4)]


def test_a_file_without_parents_is_migrated_and_its_episodes_are_chains(tmp_path: Path) -> None:
    path = tmp_path / "agentrl.db"
    with Store.open(path) as store:
        store.episodes.add([episode(chain())])
    conn = sqlite3.connect(path)
    before = [name for name, _ in MIGRATIONS].index("m011_turn_parent")
    conn.execute("DROP VIEW v_turns")
    conn.execute("ALTER TABLE turns DROP COLUMN parent")
    conn.execute("CREATE VIEW v_turns AS SELECT episode_id AS episode FROM turns")
    conn.execute("DELETE FROM _sqlite_migrations WHERE name='m011_turn_parent'")
    conn.execute(f"PRAGMA user_version={before}")
    conn.commit()
    conn.close()
    connect(path).close()
    with Store.open(path) as store:
        assert store.episodes.get("e").linear
        store.episodes.add([episode(fork(), "new")])
        assert store.episodes.get("new").branches == ((0, 1, 2, 3), (0, 1, 4, 5))
