"""Stores of an older schema, in use or not: read as they are, migrated by writers alone; copies and missing locks.

A project that was moved, copied or renamed works, and a copy never touches the original's files.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat_session.open import open_policy
from agentrl_cli.chat_session.whatif import run as what_if
from agentrl_cli.config import Config, inside
from agentrl_cli.errors import StoreError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.holder import _seconds, start_of
from agentrl_cli.store.maintenance import backup, delete_run, prune, status
from agentrl_cli.store.migration import migrate
from agentrl_cli.store.schema import MIGRATIONS, SCHEMA_VERSION
from agentrl_cli.types import Episode, Outcome, RewardPart, Task, Tokens, ToolCall, Turn
from tests.helpers.cli import Cli
from tests.helpers.train import spawn_code, spawn_well, write_model, write_pack, write_project

RUN = (
    "INSERT INTO runs (id, name, kind, status, model, pack, seed, step, total_steps, tokenizer, dir, pid, host,"
    " version, error, started, ended, heartbeat, config)"
    " VALUES ('r', 'fox', 'train', 'running', 'm', 'p', 0, 1, 9, {tokenizer}, '', ?, ?, '', '', 1, 0, ?, '{{}}')"
)
EPISODE = (
    "INSERT INTO episodes (started, reward, step, outcome, n_turns, n_tokens, n_model_tokens, n_calls, n_tool_errors,"
    " sample, seed, kind, fact, flags, pack, family, split, level, task_id, run_id, id, group_id, weights_version,"
    " tokenizer, ended, error) VALUES (1, ?, 1, ?, 1, 1, 1, 0, 0, 0, 0, 'train', '', '', 'p', '', 'train', '', ?, 'r',"
    " ?, ?, '', ?, 2, '')"
)


def old_store(path: Path, schema: int, pid: int = 2**22 + 1, heartbeat: float = 1.0) -> Path:
    """A store of an older schema with a run of a process, a solved episode and one that was not graded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode=WAL")
        migrate(conn, MIGRATIONS[:schema])
        keyed = schema >= SCHEMA_VERSION
        run = (pid, platform.node(), heartbeat)
        conn.execute(RUN.format(tokenizer="NULL" if keyed else "''"), run)
        if schema >= 8:
            conn.execute("UPDATE runs SET claim='train'")
        conn.executescript(
            """
            INSERT INTO tokenizers VALUES ('h', x'', '', '{}');
            INSERT INTO tasks VALUES ('p', 't', '', 'train', '[]', '{}', NULL);
            INSERT INTO tasks VALUES ('p', 'bare', '', 'train', '[]', '{}', '[]');
            INSERT INTO groups (id, run_id, task_id, step, at) VALUES ('g', 'r', 't', 1, 1);
            INSERT INTO alerts (run_id, at, level, name, text) VALUES ('r', 1, 'warn', 'odd', 'text');
            """
        )
        conn.execute(EPISODE, (1.0, "solved", "t", "good", "g", "h"))
        conn.execute(EPISODE, (None if schema >= 10 else 0.0, "timeout", "bare", "late", "g", "h"))
        conn.executescript(
            """
            UPDATE episodes SET flags='["NOTOOL","LOOP"]';
            INSERT INTO reward_parts (episode_id, idx, name, value, weight, is_primary, detail)
            VALUES ('good', 0, 'r', 1.0, 1.0, 1, '');
            INSERT INTO turns (episode_id,idx,role,token_start,token_end,weights_version,started,seconds,messages)
            VALUES ('good', 0, 'user', 0, 0, '', 1, 1, '[{"role": "user", "content": "x"}]');
            """
        )
    return path


def schema_of(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as conn:
        return int(conn.execute("PRAGMA user_version").fetchone()[0])


def rewards(store: Store) -> dict[str, float | None]:
    rows = store.episodes.rows(store.episodes.ids())
    flags = {row.id: row.flags for row in rows}
    assert flags == {"good": ("NOTOOL", "LOOP"), "late": ("LOOP",)}, "its task has no tools"
    return {row.id: row.reward for row in rows}


@pytest.mark.parametrize("schema", [1, 2, 7, 8, 9, 12, SCHEMA_VERSION - 1])
def test_a_reader_reads_an_old_store_and_changes_nothing(
    tmp_path: Path, schema: int, cli: Cli
) -> None:
    path = old_store(tmp_path / "a.db", schema)
    before = path.read_bytes()
    watcher = Store.open(path, readonly=True)
    second = Store.open(path, readonly=True)
    for reader in (watcher, second):
        run, good = reader.runs.get("fox"), reader.episodes.get("good")
        assert (run.claim, run.state, run.tokenizer, run.boot) == ("train", "interrupted", "", "")
        assert rewards(reader) == {"good": 1.0, "late": None}
        assert [turn.role for turn in good.turns] == ["user"] and good.linear
        assert good.reward_parts[0].fakeable is False
        assert reader.episodes.group_reason("g", "r") == "" and reader.live.all() == []
        assert reader.workers.all("r") == [] and reader.scores.sets("r") == []
        assert reader.journal.folded_alerts("r")[0]["first_step"] is None
        assert reader.select("SELECT graded, mean FROM v_groups") == [(1, 1.0)]
        assert len(reader.select("SELECT rowid FROM turns")) == 1
    second.close()
    commands = (["runs"], ["ls"], ["show", "good"], ["replay", "good", "--plain"], ["db", "status"],
                ["grep", "x"], ["query", "SELECT claim FROM runs"])  # fmt: skip
    for command in commands if schema == 1 else commands[:1]:
        cli(*command, "--db", "a.db")
    assert schema_of(path) == schema and path.read_bytes() == before
    with Store.open(path) as writer:  # no process works on it: a writer may migrate
        writer.runs.update("r", claim="other")
        assert watcher.runs.get("fox").claim == ("train" if schema < 8 else "other")
        watcher.data_version()
        assert watcher.runs.get("fox").claim == "other", "the watcher sees the new schema"
        assert rewards(writer) == {"good": 1.0, "late": None}
    assert schema_of(path) == SCHEMA_VERSION
    watcher.close()


@pytest.mark.parametrize("schema", [1, 7, 8, SCHEMA_VERSION - 1])
def test_no_writer_migrates_a_store_under_a_training_of_an_older_version(
    tmp_path: Path, schema: int, cli: Cli
) -> None:
    """Its step takes longer than a heartbeat is fresh: versions without claims wrote one a step."""
    began = _seconds(start_of(1) or "")
    path = old_store(tmp_path / "a.db", schema, pid=1, heartbeat=began + 10)
    rename = ("runs", "rename", "fox", "hare", "--db", "a.db")
    cli(*rename, code=3, said=("An older agentrl works on the run fox in", "process 1 on"))
    with Store.open(path, readonly=True) as store:
        assert store.runs.get("fox").alive
        assert store.select("SELECT * FROM events") == [] and schema_of(path) == schema
    with closing(sqlite3.connect(path)) as conn, conn:
        # written before that process began: by another
        conn.execute("UPDATE runs SET heartbeat=?", (began - 10,))
    cli(*rename)
    assert schema_of(path) == SCHEMA_VERSION
    with Store.open(
        path
    ) as store:  # versions of its weights, and settings of others, have the former name
        hare = store.runs.get("hare")
        assert store.runs.names(hare.id) == {"hare", "fox"} and store.runs.get("fox") == hare
        other = store.runs.add(RunRow(id="", name="fox", kind="eval"))
        assert store.runs.get("fox").id == other.id


MIGRATOR = """
import logging, sys
from agentrl_cli.store import Store, migration
class Step(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        if "still" in record.getMessage():
            sys.stdin.readline()
logging.getLogger("agentrl.store").addHandler(Step())
migration.PROGRESS = 1000
Store.open(sys.argv[1]).close()
"""


def test_a_locked_store_names_the_process_that_migrates(tmp_path: Path) -> None:
    path = old_store(tmp_path / "a.db", 7)
    command = [sys.executable, "-c", MIGRATOR, str(path)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        assert f"from schema 7 to {SCHEMA_VERSION}" in process.stdout.readline()
        assert "still" in process.stdout.readline()  # it waits, inside the migration
        said = rf"process {process.pid} on \S+, since \d\d:\d\d:\d\d, brings it"
        with pytest.raises(StoreError, match=said):
            Store.open(path, busy_ms=20)
        with Store.open(path, readonly=True) as store:
            assert store.runs.get("fox").name == "fox"
        process.stdin.close()
        assert "Brought" in process.stdout.read()
    assert process.returncode == 0 and schema_of(path) == SCHEMA_VERSION


def test_migration_takes_time_in_proportion_to_episodes(tmp_path: Path) -> None:
    def instructions(count: int) -> int:
        path, passed = tmp_path / f"{count}.db", 0

        def tick() -> None:
            nonlocal passed
            passed += 1

        with closing(sqlite3.connect(path, isolation_level=None)) as conn:
            migrate(conn, MIGRATIONS[: [name for name, _ in MIGRATIONS].index("m019_foreign_keys")])
            conn.execute("INSERT INTO tokenizers VALUES ('h', x'', '', '{}')")
            conn.execute("BEGIN")
            conn.execute(RUN.format(tokenizer="''").replace("'running'", "'finished'"), (0, "", 0))
            rows = [
                (1.0, "solved", f"t{n // 8 % 12}", f"e{n}", f"g{n // 8}", "h") for n in range(count)
            ]
            conn.executemany(EPISODE, rows)
            conn.executemany("INSERT INTO groups (id, run_id, task_id, step, at) VALUES (?, 'r', ?, 1, 1)",
                             [(f"g{n}", f"t{n % 12}") for n in range(count // 8)])  # fmt: skip
            conn.execute("COMMIT")
            conn.set_progress_handler(tick, 1000)
            migrate(conn)
            assert conn.execute("SELECT count(*) FROM groups WHERE pack='p'").fetchone() == (
                count // 8,
            )
        return passed

    assert instructions(16_000) < 6 * instructions(4_000), "four times the episodes"


def test_a_copy_without_its_log_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cli: Cli
) -> None:
    path, copy = tmp_path / "agentrl.db", tmp_path / "there" / "agentrl.db"
    log = Path(f"{copy}-wal")
    copy.parent.mkdir()
    with Store.open(path) as store:
        store.runs.add(RunRow("r", "fox"))
        shutil.copy(path, copy)
        for _ in range(2):  # SQLite leaves an empty log behind at the first
            cli("ls", "--db", str(copy), code=3, said=f"its log {log} is missing")
            assert "agentrl rollout" not in cli.err
        shutil.copy(f"{path}-wal", log)
        assert [run["name"] for run in cli.json("runs", "--db", str(copy))] == ["fox"]
        log.unlink()

        store.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.episodes.add([Episode("e", "t", run_id="r", outcome=Outcome.FAILED)])
        shutil.copy(path, copy)  # a part of it is in the file, and its process lives
        backup(path, tmp_path / "backup.db")
        for place, warns in ((copy, True), (path, False), (tmp_path / "backup.db", False)):
            caplog.clear()
            with Store.open(place, readonly=True) as reader:
                assert len(reader.episodes.ids()) == (0 if warns else 1)
            said = f"fox is running, and the log {place}-wal is missing"
            assert (said in caplog.text) is warns, place
        data = bytearray(copy.read_bytes())
        data[4096:] = b"\xa5" * (len(data) - 4096)
        copy.write_bytes(data)
        with (
            pytest.raises(StoreError, match="damaged") as damaged,
            Store.open(copy, readonly=True) as store,
        ):
            store.runs.all()
        assert f"Copy {log} with it" in damaged.value.hint


NO_LOCKS = """
import ctypes, errno, platform, struct, sys
FCNTL = {"x86_64": 72, "aarch64": 25}[platform.machine()]
def op(code, jt, jf, k):
    return struct.pack("HBBI", code, jt, jf, k)
DENY, ALLOW = op(0x06, 0, 0, 0x00050000 | errno.ENOLCK), op(0x06, 0, 0, 0x7FFF0000)
program = b"".join([op(0x20, 0, 0, 0), op(0x15, 0, 4, FCNTL), op(0x20, 0, 0, 24), op(0x15, 1, 0, 6), op(0x15, 0, 1, 7),
                    DENY, ALLOW])  # fcntl with F_SETLK or F_SETLKW
libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(program)
fprog = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, fprog, 0, 0) == 0, ctypes.get_errno()
from agentrl_cli.commands import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="system calls by number",
)
@pytest.mark.parametrize("command", [["ls"], ["runs", "rename", "fox", "hare"]])
def test_a_file_system_without_locks_is_reported(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        store.runs.add(RunRow("r", "fox"))
    code, said = spawn_code(tmp_path, NO_LOCKS, *command, "--db", str(path))
    assert code == 3 and "backup" not in said, said
    assert "has no file locks" in said and "local disk" in said


# --- foreign keys ---


BEFORE = [name for name, _ in MIGRATIONS].index("m019_foreign_keys")
UNKEYED = (
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


def unkeyed_store(path: Path, episodes: int = 3) -> None:
    """A store of the last version without foreign keys. Of its episodes 0 is whole, and the others refer to nothing."""
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode=WAL")
        migrate(conn, MIGRATIONS[:BEFORE])
        run = "'train','finished','m','p',1,1,1,?,?,1,'',1,'','','',1,1,1,'{}','','',''"
        conn.execute(f"INSERT INTO runs VALUES ('r0','a',{run})", ("known", None))
        conn.execute(f"INSERT INTO runs VALUES ('r1','b',{run})", ("", "missing"))
        conn.executescript(
            """
            INSERT INTO tokenizers VALUES ('known', x'00', '', '{}');
            INSERT INTO tasks VALUES ('pack', 't0', 'f', 'train', '[]', '{}', NULL);
            INSERT INTO groups VALUES (7, 'g0', 'r0', 't0', 0, 1, 'curriculum');
            INSERT INTO turns (episode_id,idx,role,token_start,token_end,weights_version,started,seconds,messages)
            VALUES ('e0',0,'user',0,0,'',1,1,'[]');
            CREATE VIEW mine AS SELECT id FROM episodes;
            CREATE TABLE seen (id TEXT);
            CREATE TRIGGER tr AFTER INSERT ON seen BEGIN SELECT count(*) FROM episodes; END;
            """
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
            conn.execute(UNKEYED, values)


def rows(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as conn:
        return {
            table: conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in KEPT
        }


def test_an_old_store_keeps_every_row_and_lists_what_referred_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    unkeyed_store(path)
    before = rows(path)
    with Store.open(path) as store:
        # missing tasks and groups are added from the episodes
        assert rows(path) == before | {"tasks": 3, "groups": 3}
        assert store.select("PRAGMA foreign_key_check") == []
        assert store.select("PRAGMA foreign_keys") == [(1,)]
        sql = "SELECT rowid, id, tokenizer, group_id, task_id, parent_id FROM episodes ORDER BY id"
        assert store.select(sql) == [
            (10, "e0", "known", "g0", "t0", None),
            (11, "e1", "lost", "g1", "t1", "e0"),
            (12, "e2", "lost", "g2", "t2", None),
        ]
        kept = store.select("SELECT n, why, pack FROM groups WHERE id='g0'")
        assert kept == [(7, "curriculum", "pack")]
        # only the name of t1 is known
        assert [task for task in ("t0", "t1") if store.tasks.get(task)] == ["t0"]
        runs = {run.name: (run.tokenizer, run.parent_id) for run in store.runs.all()}
        assert runs == {"a": ("known", None), "b": ("", None)}
        assert store.select("SELECT count(*) FROM mine") == [(3,)]
        assert ("tr",) in store.select("SELECT name FROM sqlite_schema WHERE type='trigger'")
        listed = "\n".join(line["text"] for line in store.journal.logs(None))
        assert "episodes.parent_id" in listed and "missing (1)" in listed
    assert status(path, check=True).check == "ok"


def test_a_kill_during_the_migration_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    unkeyed_store(path, 400)
    before = rows(path)
    for ticks in ("400", "1300"):
        code, _ = spawn_code(tmp_path, KILL, str(path), ticks)
        assert code == -signal.SIGKILL, "it has to come before the migration ends"
        with closing(sqlite3.connect(path)) as conn:
            assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert schema_of(path) in (BEFORE, len(MIGRATIONS))
    with Store.open(path) as store:
        assert {**rows(path), "tasks": 1, "groups": 1} == before
        assert store.select("PRAGMA foreign_key_check") == []


def test_what_refers_to_a_deleted_row(tmp_path: Path) -> None:
    turn = Turn(0, "assistant", (), 0, 1, calls=(ToolCall("c", "f", {}, ""),))
    ended: dict[str, Any] = {
        "outcome": Outcome.SOLVED, "started": 1.0, "ended": 2.0, "turns": (turn,),
        "tokens": Tokens.from_ids([1], [2]), "reward_parts": (RewardPart("r", 1.0),),
    }  # fmt: skip

    def made(name: str, **more: Any) -> Episode:
        return Episode(name, "t", "pack").with_(**ended, **more)

    with Store.open(tmp_path / "a.db") as store:
        for name in ("r0", "r1"):
            store.runs.add(RunRow(id=name, name=name, status="finished"))
            store.journal.add_log(name, "info", "x")
            store.runs.add_step(name, 1, {"a": 1.0})
            store.episodes.add(
                made(f"e{name}{n}", run_id=name, group_id="g", sample=n) for n in range(2)
            )
        fork = store.runs.add(
            RunRow("r2", "fork", status="finished", parent_id="r0", parent_step=3)
        )
        child = made("child", parent_id="er00", parent_turn=1)
        store.episodes.add([child, made("grandchild", parent_id="child")])
        store.episodes.add([made("x")], tokenizer="later")
        assert store.episodes.row("x").tokenizer == "later"
        assert store.tokenizers.get("later") is None, "only its name is known"
        store.tokenizers.add("later", "{}")
        store.tasks.add([Task("t", "pack", "f", "train", (), {"a": 1})])
        assert store.tokenizers.get("later") and store.tasks.get("t")
        assert store.episodes.row("child").split == "" and prune(store, ["child"], "episodes") == 1
        assert store.episodes.row("grandchild").parent_id is None
        assert delete_run(store, store.runs.get("r0")) == 2
        assert store.select("SELECT id, run_id FROM groups") == [("g", "r1")]
        tables = ("episodes", "turns", "turn_tokens", "tool_calls", "reward_parts")
        wanted = {**dict.fromkeys(tables, 4), "logs": 1, "steps": 1}
        assert status(Path(store.path)).rows.items() >= wanted.items()
        left = store.runs.get(fork.id)
        assert (left.parent_id, left.parent_step) == (None, 3)
        store.episodes.start(made("late", parent_id="er00").with_(outcome=None))
        assert store.episodes.row("late").parent_id is None, "its parent was deleted while it ran"
        assert store.select("PRAGMA foreign_key_check") == []


# --- projects that were moved, copied or renamed ---


NAME = "bandit-grpo"
UNCLAIMED = next(n for n, (name, _) in enumerate(MIGRATIONS) if name.endswith("_claim"))


def files_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file with its time of change and a hash."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def trained_project(folder: Path, **sections: Any) -> Path:
    project = folder / "before"
    model = write_model(project / "models" / "base")
    write_pack(project / "packs" / "bandit")
    (project / "hook.py").write_text("class Nothing:\n    def on_update(self, metrics): ...\n")
    write_project(project, model, deterministic=True, train={"steps": 1}, **sections)
    settings = json.loads((project / "agentrl.yaml").read_text())
    del settings["model"]["name"]
    settings["task"] = {"packs": ["packs/bandit"]}
    (project / "agentrl.yaml").write_text(json.dumps(settings))
    (project / "task.yaml").unlink()
    args = ("--model", str(model), "--pack", str(project / "packs" / "bandit"))
    spawn_well(project, "train", *args, "--set", f"hooks=['{project}/hook.py:Nothing']")
    return project


def texts(db: Path) -> str:
    tables = ("runs", "checkpoints", "evals", "events", "episodes", "score_sets")
    with contextlib.closing(sqlite3.connect(db)) as conn:
        rows = [row for table in tables for row in conn.execute(f"SELECT * FROM {table}")]
    return "\n".join(map(str, rows))


def test_a_project_that_was_copied_moved_and_renamed(tmp_path: Path, cli: Cli) -> None:
    before = trained_project(tmp_path, adapter={"enabled": True, "r": 4})
    assert str(tmp_path) not in texts(before / "runs" / "agentrl.db")
    copy, renamed, moved = (tmp_path / name for name in ("copy", "renamed", "far/away/project"))
    shutil.copytree(before, copy)
    was = files_of(before)
    said = spawn_well(copy, "train", "--resume", NAME, "--steps", "2")
    assert "resumed at step 1" in said and files_of(before) == was, "the original is as it was"
    (copy / "output.txt").unlink()
    before.rename(renamed)  # what still reads it now fails
    moved.parent.mkdir(parents=True)
    shutil.move(copy, moved)
    _works(moved, cli)
    assert files_of(renamed) == was
    said = spawn_well(renamed, "train", "--resume", "last", "--steps", "2")
    assert "resumed at step 1" in said
    _works(renamed, cli)
    kept, cli.folder = files_of(renamed / "runs" / NAME), moved
    cli("runs", "delete", NAME, "--yes")
    assert not (moved / "runs" / NAME).exists() and files_of(renamed / "runs" / NAME) == kept


def _works(project: Path, cli: Cli) -> None:
    """Everything that reads a run, in a project that lies elsewhere than it was trained."""
    cli.folder, db = project, project / "runs" / "agentrl.db"
    with Store.open(db, readonly=True) as store:
        run = store.runs.get(NAME)
        rows = store.runs.checkpoints(run.id)
        episode = store.episodes.rows(store.episodes.ids(run=run.id))[0].id
    assert run.step == 2 and Path(run.dir) == project / "runs" / NAME
    assert all(Path(row.path).is_dir() and Path(row.path).is_relative_to(project) for row in rows)
    for command in (
        ["merge", f"{NAME}@last", str(project / "merged")],
        ["eval", "--checkpoint", f"{NAME}@last", "--limit", "2", "-k", "1", "--json"],
        ["compare", NAME, "last"],
        ["rescore", NAME, "--advantage", "rloo", "--json"],
        ["replay", episode, "--plain"],
    ):
        cli(*command)
    merged, base = (project / name / "model.safetensors" for name in ("merged", "models/base"))
    assert merged.read_bytes() != base.read_bytes()
    with contextlib.chdir(project):
        config = Config.model_validate({**run.config})
        policy, _ = open_policy(f"{NAME}@last", config, db, base=project)
        assert policy.weights_version == f"{NAME}@2", "the step, whatever `last` means later"
        asyncio.run(policy.close())
        where = ["--db", str(db), "--episode", episode, "--turn", "1", "--samples", "1"]
        output = io.StringIO()
        status = asyncio.run(what_if([*where, "--model", f"{NAME}@last"], output))
    assert status == 0, output.getvalue()


def test_settings_that_name_places_inside_the_project(tmp_path: Path) -> None:
    given = {
        "model": {"name": f"{tmp_path}/model", "chat_template": "/elsewhere/chat.jinja"},
        "task": {"packs": [str(tmp_path), f"{tmp_path}/packs/a", "code-task", f"{tmp_path}-2/b"]},
        "hooks": [f"{tmp_path}/hook.py:Hook", "hook.py:Other"],
    }
    config = inside(Config.model_validate(given), tmp_path)
    assert (config.model.name, config.model.chat.template) == ("./model", "/elsewhere/chat.jinja")
    assert config.task.packs == [".", "./packs/a", "code-task", f"{tmp_path}-2/b"]
    assert config.hooks == ["./hook.py:Hook", "hook.py:Other"]


# --- old stores ------------------------------------------------------------------------------------------------


def store_with_paths(project: Path, lay: Path) -> Path:
    """A store with absolute paths in the project, made where `lay` was: a run, two checkpoints, one of them outside."""
    db = project / "runs" / "agentrl.db"
    (project / "runs" / "fox" / "checkpoints" / "best").mkdir(parents=True)
    (project / "agentrl.yaml").write_text("seed: 1\n")
    packs = [f"{lay}/pack", "/other/pack"]
    config = json.dumps({"model": {"name": f"{lay}/model"}, "task": {"packs": packs}})
    best, other = f"{lay}/runs/fox/checkpoints/best", "/other/step-000001"
    with contextlib.closing(sqlite3.connect(db, isolation_level=None)) as conn:
        migrate(conn, MIGRATIONS[:UNCLAIMED])
        for sql, values in (
            (
                "INSERT INTO runs VALUES ('r', 'fox', 'train', 'running', ?, 'p', 0, 1, 9, '', NULL, NULL, ?, 4194305,"
                " '', '', '', 1, 0, 1, ?)",
                (f"{lay}/model", f"{lay}/runs/fox", config),
            ),
            ("INSERT INTO checkpoints VALUES (NULL, 'r', 1, 'best', ?, '{}', 1)", (best,)),
            ("INSERT INTO checkpoints VALUES (NULL, 'r', 1, 'step', ?, '{}', 1)", (other,)),
            (
                "INSERT INTO evals VALUES (NULL, 'r', 1, ?, 'test', 1, 1, 1, 1, 1, '{}', 1)",
                (f"{lay}/model",),
            ),
        ):
            conn.execute(sql, values)
    return db


@pytest.mark.parametrize("case", ["in place", "moved", "copied"])
def test_stores_of_before_are_migrated(tmp_path: Path, case: str) -> None:
    project = tmp_path / "project"
    lay = project if case == "in place" else tmp_path / "before"
    if case == "copied":
        store_with_paths(lay, lay)
    db, folder = store_with_paths(project, lay), project / "runs" / "fox"
    before = texts(db)
    for readonly in (True, False):  # a reader sees the same
        with Store.open(db, readonly=readonly) as store:
            run = store.runs.get("fox")
            assert (run.dir, run.model) == (str(folder), "./model")
            packs = {"packs": ["./pack", "/other/pack"]}
            assert run.config == {"model": {"name": "./model"}, "task": packs}
            places = [row.path for row in store.runs.checkpoints("r")]
            assert places == [str(folder / "checkpoints" / "best"), "/other/step-000001"]
            assert [row.name for row in store.runs.evals("r")] == ["./model"]
            assert (run.claim, run.alive, run.state) == ("train", False, "interrupted")
        assert not readonly or texts(db) == before, "reading changes nothing"
    assert str(tmp_path) not in texts(db)
    with Store.open(db) as store:
        delete_run(store, run)
    assert not folder.exists() and (lay / "runs" / "fox").is_dir() is (case == "copied")


def test_a_store_that_was_moved_away_from_its_runs_still_finds_them(tmp_path: Path) -> None:
    lay, alone = tmp_path / "before", tmp_path / "alone.db"
    store_with_paths(lay, lay).rename(alone)
    folder = lay / "runs" / "fox"
    with Store.open(alone) as store:
        run, best = store.runs.get("fox"), store.runs.checkpoints("r")[0]
        assert (run.dir, best.path) == (str(folder), str(folder / "checkpoints" / "best"))
        delete_run(store, run)
    assert folder.is_dir(), "it does not lie beside the store"


def test_a_folder_that_two_stores_use_stays(tmp_path: Path, cli: Cli) -> None:
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add_folder(store.runs.add(RunRow("", "fox", status="finished")))
    cli("db", "backup", "backup.db", "--db", "a.db")
    delete = ("runs", "delete", "fox", "--yes", "--db")
    cli(*delete, "backup.db", said=f"The folder {run.dir} is kept")
    assert Path(run.dir).is_dir()
    cli(*delete, "a.db")
    assert not Path(run.dir).exists()


def test_paths_in_a_store_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open("runs/a.db") as store:
        run = store.runs.add_folder(store.runs.add(RunRow("", "fox")))
        assert Path(run.dir) == tmp_path / "runs" / "fox"
        assert store.runs.get("fox") == run == store.runs.add_folder(run)
        best = Path(run.dir) / "checkpoints" / "best"
        store.runs.add_checkpoint(run.id, 1, best, {}, "best")
        store.runs.add_checkpoint(run.id, 1, "/elsewhere/step-1", {})
        monkeypatch.chdir("/")
        places = [row.path for row in store.runs.checkpoints(run.id)]
        assert places == [str(best), "/elsewhere/step-1"]
        rows = store.select("SELECT dir, path FROM runs JOIN checkpoints ON run_id=runs.id")
        assert rows == [("fox", "fox/checkpoints/best"), ("fox", "/elsewhere/step-1")]
        store.runs.remove_checkpoint(run.id, best)
        assert [row.path for row in store.runs.checkpoints(run.id)] == ["/elsewhere/step-1"]
