"""The table of candidates: added by the first writer, read where missing, kept in stores of earlier versions."""

import sqlite3
from contextlib import closing
from pathlib import Path

from agentrl_cli.plugins.prompts.store import PromptRow, Prompts
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.maintenance import delete_run, status
from agentrl_cli.store.migration import migrate
from agentrl_cli.store.schema import MIGRATIONS

RUN = (
    "INSERT INTO runs VALUES ('r', 'a', 'optimize', 'finished', 'm', 'p', 1, 1, 1, '', NULL, 1, '', 1, '', '', '', 1,"
    " 1, 1, '{}', '', '', '')"
)
TABLE = """CREATE TABLE prompts (
    n INTEGER PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, id TEXT NOT NULL,
    parent_id TEXT, origin TEXT NOT NULL, parts TEXT NOT NULL, scores TEXT NOT NULL, at REAL NOT NULL,
    UNIQUE (run_id, id)
) STRICT"""


def test_a_store_gets_the_table_when_a_candidate_is_added(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Store.open(path) as store, Store.open(path, readonly=True) as watcher:
        store.runs.add(RunRow(id="r", name="r", status="finished"))
        assert Prompts(watcher).all("r") == []
        for id, parent in (("p", None), ("q", "p")):
            Prompts(store).add(PromptRow("r", id, parent, "seed", {"system": id}))
        assert [row.id for row in Prompts(watcher).all("r")] == ["p", "q"]
        assert delete_run(store, store.runs.get("r")) == 0 and Prompts(store).all("r") == []


def test_a_store_of_an_earlier_version_keeps_its_candidates(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode=WAL")
        migrate(conn, MIGRATIONS[:16])
        conn.execute(TABLE)
        conn.execute(RUN)
        conn.execute("INSERT INTO prompts VALUES (1, 'r', 'p', 'missing', 'gepa', '{}', '{}', 1)")
    with Store.open(path, readonly=True) as store:
        assert [row.id for row in Prompts(store).all("r")] == ["p"]
    with Store.open(path) as store:
        Prompts(store).add(PromptRow("r", "q", "p", "gepa", {}))
        assert [(row.id, row.parent_id) for row in Prompts(store).all("r")] == [
            ("p", "missing"),
            ("q", "p"),
        ]
    assert status(path, check=True).check == "ok"
