"""Foreign keys: old stores with rows that refer to nothing, `kill -9` during their migration, and deleting."""

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentrl_cli.errors import StoreError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.holder import Holder
from agentrl_cli.store.maintenance import delete_run, prune, status
from agentrl_cli.store.migration import migrate
from agentrl_cli.store.schema import MIGRATIONS
from agentrl_cli.types import Episode, Outcome, Task

BEFORE = [name for name, _ in MIGRATIONS].index("m019_foreign_keys")
EPISODE = (
    "INSERT INTO episodes VALUES (?1, 1, 1, NULL, NULL, 0, 'solved', 1, 1, 1, 0, 0, 0, 0, 'train', '', '', 'pack', 'f',"
    " 'train', '', ?2, ?3, ?4, ?5, ?6, NULL, 'w', ?7, 2, NULL, '')"
)
KEPT = ("runs", "groups", "episodes", "turns", "turn_tokens", "tasks")
KILL = """
import os, sqlite3, sys
from agentrl_cli.store.migration import migrate
conn = sqlite3.connect(sys.argv[1], isolation_level=None)
left = int(sys.argv[2])
def tick():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
conn.set_progress_handler(tick, 50)
migrate(conn)
"""


def old_store(path: Path, episodes: int = 3) -> None:
    """A store of the last version without foreign keys. Of its episodes 0 is whole, and the others refer to nothing."""
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode=WAL")
        migrate(conn, MIGRATIONS[:BEFORE])
        run = "'train','finished','m','p',1,1,1,?,?,1,'',1,'','','',1,1,1,'{}','','',''"
        conn.execute(f"INSERT INTO runs VALUES ('r0','a',{run})", ("known", None))
        conn.execute(f"INSERT INTO runs VALUES ('r1','b',{run})", ("", "missing"))
        conn.execute("INSERT INTO tokenizers VALUES ('known', x'00', '', '{}')")
        conn.execute("INSERT INTO tasks VALUES ('pack', 't0', 'f', 'train', '[]', '{}', NULL)")
        conn.execute("INSERT INTO groups VALUES (7, 'g0', 'r0', 't0', 0, 1, 'curriculum')")
        conn.execute("INSERT INTO turns (episode_id,idx,role,token_start,token_end,weights_version,started,seconds,"
                     "messages) VALUES ('e0',0,'user',0,0,'',1,1,'[]')")  # fmt: skip
        conn.execute("CREATE VIEW mine AS SELECT id FROM episodes")
        conn.execute("CREATE TABLE seen (id TEXT)")
        conn.execute(
            "CREATE TRIGGER tr AFTER INSERT ON seen BEGIN SELECT count(*) FROM episodes; END"
        )
        for n in range(episodes):
            parent = None if n == 0 else "e0" if n == 1 else "missing"
            values = (
                n + 10,
                f"t{n}",
                "r0" if n < 2 else None,
                f"e{n}",
                f"g{n}",
                parent,
                "known" if n == 0 else "lost",
            )
            conn.execute(EPISODE, values)


def rows(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as conn:
        return {
            table: conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in KEPT
        }


def test_an_old_store_keeps_every_row_and_lists_what_referred_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    old_store(path)
    before = rows(path)
    with Store.open(path) as store:
        after = rows(path)
        assert after == before | {"tasks": 3, "groups": 3}, (
            "missing tasks and groups are added from the episodes"
        )
        assert store.conn.execute("PRAGMA foreign_key_check").fetchall() == []
        assert store.conn.execute("PRAGMA foreign_keys").fetchone() == (1,)
        whole, fork, lost = (store.episodes.row(f"e{n}") for n in range(3))
        assert (whole.rowid, whole.tokenizer, whole.group_id, whole.task_id) == (
            10,
            "known",
            "g0",
            "t0",
        )
        assert (fork.parent_id, fork.tokenizer, lost.parent_id) == ("e0", "lost", None)
        assert store.select("SELECT n, why, pack FROM groups WHERE id='g0'") == [
            (7, "curriculum", "pack")
        ]
        assert store.tasks.get("t0") is not None and store.tasks.get("t1") is None, (
            "only the name of t1 is known"
        )
        runs = {run.name: (run.tokenizer, run.parent_id) for run in store.runs.all()}
        assert runs == {"a": ("known", None), "b": ("", None)}
        assert store.select("SELECT count(*) FROM mine") == [(3,)]
        assert store.select(
            "SELECT name FROM sqlite_schema WHERE type='trigger' AND name='tr'"
        ) == [("tr",)]
        listed = "\n".join(line["text"] for line in store.journal.logs(None))
        assert "episodes.parent_id" in listed and "missing (1)" in listed
    assert status(path, check=True).check == "ok"


def test_a_kill_during_the_migration_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    old_store(path, 400)
    before, killed = rows(path), 0
    for ticks in (400, 1300):
        ended = subprocess.run([sys.executable, "-c", KILL, str(path), str(ticks)], check=False)
        killed += ended.returncode == -signal.SIGKILL
        with closing(sqlite3.connect(path)) as conn:
            assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert conn.execute("PRAGMA user_version").fetchone() in ((BEFORE,), (len(MIGRATIONS),))
    assert killed == 2, "the kills have to come before the migration ends"
    with Store.open(path) as store:
        assert {**rows(path), "tasks": 1, "groups": 1} == before
        assert store.conn.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_store_in_use_by_an_older_agentrl_is_not_migrated(tmp_path: Path) -> None:
    path, me = tmp_path / "a.db", Holder.of()
    old_store(path)
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("UPDATE runs SET claim='train', heartbeat=0, pid=?, pid_started=?, boot=?, host=?"
                     " WHERE id='r0'", (me.pid, me.pid_started, me.boot, me.host))  # fmt: skip
        conn.commit()
    with pytest.raises(StoreError, match="An older agentrl works on the run a in"):
        Store.open(path)
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("PRAGMA user_version").fetchone() == (BEFORE,)


def test_what_refers_to_a_deleted_row(tmp_path: Path) -> None:
    def made(name: str, **more: object) -> Episode:
        ended = {"outcome": Outcome.SOLVED, "pack": "pack", "started": 1.0, "ended": 2.0}
        return Episode(name, "t", **{**ended, **more})  # type: ignore[arg-type]

    with Store.open(tmp_path / "a.db") as store:
        for name in ("r0", "r1"):
            store.runs.add(RunRow(id=name, name=name, status="finished"))
        fork = store.runs.add(
            RunRow(id="r2", name="fork", status="finished", parent_id="r0", parent_step=3)
        )
        store.episodes.add(
            made(f"e{run}{n}", run_id=run, group_id="g", sample=n)
            for run in ("r0", "r1")
            for n in "01"
        )
        store.episodes.add(
            [made("child", parent_id="er00", parent_turn=1), made("grandchild", parent_id="child")]
        )
        store.episodes.add([made("x")], tokenizer="later")
        assert (
            store.episodes.row("x").tokenizer == "later" and store.tokenizers.get("later") is None
        )
        store.tokenizers.add("later", "{}")
        assert store.tokenizers.get("later") is not None
        store.tasks.add([Task("t", "pack", "f", "train", (), {"a": 1})])
        assert store.tasks.get("t") is not None and store.episodes.row("child").split == ""
        assert prune(store, ["child"], "episodes") == 1
        assert store.episodes.row("grandchild").parent_id is None
        assert delete_run(store, store.runs.get("r0")) == 2
        assert store.select("SELECT id, run_id FROM groups") == [("g", "r1")]
        assert (
            store.runs.get(fork.id).parent_id is None and store.runs.get(fork.id).parent_step == 3
        )
        store.episodes.start(made("late", parent_id="er00", outcome=None))
        assert store.episodes.row("late").parent_id is None, "its parent was deleted while it ran"
        assert store.conn.execute("PRAGMA foreign_key_check").fetchall() == []
