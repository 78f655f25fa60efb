"""Export, secrets, read-only SQL, searching text."""

import json
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli.errors import StoreError, UsageError
from agentrl_cli.reports.export import export_lines, write_lines
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.queries import grep, run_query, schema
from agentrl_cli.store.schema import SCHEMA_VERSION
from agentrl_cli.types import (
    Episode,
    Origin,
    Outcome,
    RewardPart,
    Tokens,
    ToolCall,
    ToolResult,
    TrainSignals,
    Turn,
)
from tests.helpers.cli import Cli
from tests.helpers.trees import episode as tree_episode
from tests.helpers.trees import fork, three_leaves
from tests.reports.test_report import SECRET


@pytest.fixture
def store(store: Store) -> Store:
    store.runs.add(RunRow(id="r1", name="grpo"))
    for n, text in enumerate(["What is 12 * 4,5?\nThink.", f"my key is {SECRET}"]):
        tokens = Tokens.from_ids([n, 2, 3], [Origin.USER] * 3)
        calls = (ToolCall("c", "calculator", {"expr": "12 * 4,5"}, "{}"),)
        called = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "calculator"}}],
        }
        store.episodes.finish(
            Episode(
                f"e{n}",
                "calc/1",
                run_id="r1",
                turns=(
                    Turn(
                        0,
                        "user",
                        ({"role": "user", "content": [{"type": "text", "text": text}]},),
                        0,
                        3,
                    ),
                    Turn(1, "assistant", (called,), 3, 3, calls=calls),
                    Turn(
                        2,
                        "tool",
                        ({"role": "tool", "content": "54.0"},),
                        3,
                        3,
                        results=(ToolResult("54.0"),),
                    ),
                ),
                tokens=tokens,
                reward_parts=(RewardPart("correct", float("nan"), 1.0, primary=True),),
                outcome=Outcome.FAILED,
                started=1.0 + n,
            )
        )
    return store


def test_sequences_are_a_row_per_branch_with_shared_tokens_as_context(
    store: Store, tmp_path: Path, cli: Cli
) -> None:
    one = tree_episode(fork(), "tree", 0.5)
    store.episodes.add([one, tree_episode(three_leaves()[:1], "bare")])
    column = np.where(one.tokens.trained_mask, np.float32(0.25), np.float32(np.nan))
    store.signals.add(
        "tree", TrainSignals(column, column, column, np.zeros(len(column), np.int8), column)
    )
    store.flush()
    out = tmp_path / "rows.jsonl"
    given = ["export", "tree", "bare", "--format", "sequences", "--db", str(store.path)]
    cli(*given, "--out", str(out))
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["branch"], first["branches"], first["turns"], first["reward"]) == (
        0,
        2,
        [0, 1, 2, 3],
        0.5,
    )
    assert second["input_ids"] == [10, 11, 12, 20, 21, 31, 32, 25] and second["turns"] == [
        0,
        1,
        4,
        5,
    ]
    assert second["loss_mask"] == [0] * 7 + [1] and second["old_log_probs"] == [None] * 7 + [-1.5]
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 0, 1, 1, 1] and first["advantages"][-1] == 0.25
    assert len(cli(*given).splitlines()) == 2


def test_export_holds_everything_and_is_json_for_everybody(store: Store, tmp_path: Path) -> None:
    column = np.array([np.nan, 0.1, -0.0], np.float32)
    store.signals.add(
        "e0", TrainSignals(column, column, column, np.array([0, 1, 0], np.int8), column)
    )
    out = tmp_path / "out.jsonl"
    store.marks.tag("e0", "seen")
    assert write_lines(export_lines(store, ["e0", "e1"]), out) == 2
    lines = out.read_text(encoding="utf-8").splitlines()

    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first["id"], first["outcome"], first["reward"], first["masked"]) == (
        "e0",
        "failed",
        None,
        False,
    )
    assert first["tokens"]["ids"] == [0, 2, 3] and first["tokens"]["logp_policy"] == [None] * 3
    assert first["signals"]["ratio"] == [None, 0.1, 0.0] and first["signals"]["clipped"] == [
        0,
        1,
        0,
    ]
    assert (first["split"], first["tags"], first["note"]) == ("", ["seen"], "")
    assert first["turns"][1]["calls"][0]["arguments"] == {"expr": "12 * 4,5"}
    assert first["turns"][2]["results"][0]["text"] == "54.0"
    assert (second["masked"], second["tokens"]) == (True, None)  # the ids spell the secret
    assert SECRET not in out.read_text() and "my key is [masked:api-key]" in lines[1]
    assert write_lines(export_lines(store, ["e1"], masked=False, tokens=False), out) == 1
    (bare,) = map(json.loads, out.read_text().splitlines())
    assert SECRET in bare["turns"][0]["messages"][0]["content"][0]["text"] and "tokens" not in bare
    with pytest.raises(StoreError, match="could not be written"):
        write_lines(export_lines(store, ["e0"]), tmp_path / "no" / "out.jsonl")
    assert list(tmp_path.glob("*.part")) == []
    link, pipe = tmp_path / "link.jsonl", tmp_path / "pipe"
    link.symlink_to(out.name)
    assert write_lines(["kept"], link) == 1 and link.is_symlink() and out.read_text() == "kept\n"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        assert write_lines(["sent"], pipe) == 1 and read.result() == "sent\n"
    assert pipe.is_fifo(), "a device such as /dev/null was replaced by a file"


@pytest.mark.parametrize(
    ("sql", "given", "rows"),
    [
        (
            "SELECT id, outcome FROM v_episodes WHERE run=? ORDER BY id",
            ["grpo"],
            [("e0", "failed"), ("e1", "failed")],
        ),
        (
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c LIMIT 3) SELECT sum(x) FROM c",
            [],
            [(6,)],
        ),
        ("PRAGMA user_version", [], [(SCHEMA_VERSION,)]),
    ],
)
def test_query_reads(store: Store, sql: str, given: list[str], rows: list[tuple[Any, ...]]) -> None:
    assert list(run_query(Path(store.path), sql, given)[1]) == rows
    kinds = {name: kind for kind, name, _ in schema(Path(store.path))}
    assert (kinds["v_turns"], kinds["turn_tokens"]) == ("view", "table")
    assert "_sqlite_migrations" not in kinds


FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT count(*) FROM c"


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("DELETE FROM episodes", ""),
        ("UPDATE runs SET name='x'", ""),
        ("INSERT INTO tags VALUES ('a','e0',1)", ""),
        ("DROP TABLE runs", ""),
        ("CREATE TABLE x (a)", ""),
        ("CREATE TEMP TABLE x (a)", ""),
        ("ATTACH 'other.db' AS other", ""),
        ("VACUUM INTO 'copy.db'", ""),
        ("PRAGMA user_version=9", ""),
        ("PRAGMA journal_mode=DELETE", ""),
        ("PRAGMA writable_schema=ON", ""),
        ("PRAGMA query_only=OFF", ""),
        ("SELECT load_extension('x')", ""),
        ("BEGIN", ""),
        ("SELECT 1; DELETE FROM episodes", ""),
        ("SELECT rewad FROM episodes", "no such column: rewad"),
        ("SELECT ?", ""),
        (FOREVER, "too long"),
    ],
)
def test_query_does_nothing_but_read(store: Store, tmp_path: Path, sql: str, said: str) -> None:
    before = sorted(item.name for item in tmp_path.iterdir())
    with pytest.raises(UsageError, match=said or None):
        list(run_query(Path(store.path), sql, timeout=0.1 if sql == FOREVER else 10)[1])
    assert (
        len(store.episodes.ids()) == 2
        and sorted(item.name for item in tmp_path.iterdir()) == before
    )
    with closing(sqlite3.connect(store.path)) as conn, conn:
        assert conn.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    conn.close()


def test_grep(store: Store) -> None:
    hits = list(grep(store, r"\d+ \* 4"))
    assert [
        (hit.episode_id, hit.turn, hit.role, hit.line[hit.start : hit.end]) for hit in hits
    ] == [("e0", 0, "user", "12 * 4")]
    assert [hit.episode_id for hit in grep(store, "CALC", ignore_case=True)] == ["e1", "e0"]
    assert [hit.turn for hit in grep(store, "54", filter="id:e0", role="tool", run="r1")] == [2]
    assert list(grep(store, "^think")) == [] and len(list(grep(store, "^Think"))) == 1
    with pytest.raises(UsageError, match="cannot be read"):
        grep(store, "(")
