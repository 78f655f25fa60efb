"""Stores of an older schema, in use or not: read as they are, migrated by writers alone; copies and missing locks."""

import json
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.errors import StoreError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.holder import Holder, _seconds, start_of
from agentrl_cli.store.maintenance import backup, delete_run, prune, status
from agentrl_cli.store.migration import migrate
from agentrl_cli.store.schema import MIGRATIONS, SCHEMA_VERSION
from agentrl_cli.types import Episode, Outcome, Task

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
        conn.execute("INSERT INTO tokenizers VALUES ('h', x'', '', '{}')")
        conn.execute(
            RUN.format(tokenizer="NULL" if keyed else "''"), (pid, platform.node(), heartbeat)
        )
        if schema >= 8:
            conn.execute("UPDATE runs SET claim='train'")
        conn.execute("INSERT INTO tasks VALUES ('p', 't', '', 'train', '[]', '{}', NULL)")
        conn.execute(
            "INSERT INTO groups (id, run_id, task_id, step, at) VALUES ('g', 'r', 't', 1, 1)"
        )
        conn.execute(EPISODE, (1.0, "solved", "t", "good", "g", "h"))
        conn.execute(EPISODE, (None if schema >= 10 else 0.0, "timeout", "t", "late", "g", "h"))
        conn.execute("INSERT INTO reward_parts (episode_id, idx, name, value, weight, is_primary, detail)"
                     " VALUES ('good', 0, 'r', 1.0, 1.0, 1, '')")  # fmt: skip
        message = json.dumps([{"role": "user", "content": "x"}])
        conn.execute("INSERT INTO turns (episode_id,idx,role,token_start,token_end,weights_version,started,seconds,"
                     "messages) VALUES (?, 0, ?, 0, 0, ?, 1, 1, ?)", ("good", "user", "", message))  # fmt: skip
        conn.execute(
            "INSERT INTO alerts (run_id, at, level, name, text) VALUES ('r', 1, 'warn', 'odd', 'text')"
        )
    return path


def schema_of(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as conn:
        return int(conn.execute("PRAGMA user_version").fetchone()[0])


def rewards(store: Store) -> dict[str, float | None]:
    return {row.id: row.reward for row in store.episodes.rows(store.episodes.ids())}


@pytest.mark.parametrize("schema", [1, 2, 7, 8, 9, 12, SCHEMA_VERSION - 1])
def test_a_reader_reads_an_old_store_and_changes_nothing(
    tmp_path: Path, schema: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = old_store(tmp_path / "a.db", schema)
    before = path.read_bytes()
    watcher = Store.open(path, readonly=True)
    for reader in (watcher, Store.open(path, readonly=True)):
        run = reader.runs.get("fox")
        assert (run.claim, run.state, run.tokenizer, run.boot) == ("train", "interrupted", "", "")
        assert rewards(reader) == {"good": 1.0, "late": None}
        assert [turn.role for turn in reader.episodes.get("good").turns] == ["user"]
        assert reader.episodes.get("good").linear
        assert reader.episodes.get("good").reward_parts[0].fakeable is False
        assert reader.episodes.group_reason("g", "r") == "" and reader.live.all() == []
        assert reader.workers.all("r") == [] and reader.scores.sets("r") == []
        assert reader.journal.folded_alerts("r")[0]["first_step"] is None
        assert reader.select("SELECT graded, mean FROM v_groups") == [(1, 1.0)]
        assert len(reader.select("SELECT rowid FROM turns")) == 1
    for command in (["runs"], ["ls"], ["show", "good"], ["replay", "good", "--plain"], ["db", "status"],
                    ["grep", "x"], ["query", "SELECT claim FROM runs"]):  # fmt: skip
        assert main([*command, "--db", str(path)]) == 0, (command, capfd.readouterr().err)
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
    tmp_path: Path, schema: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its step takes longer than a heartbeat is fresh: versions without claims wrote one a step."""
    began = _seconds(start_of(1) or "")
    path = old_store(tmp_path / "a.db", schema, pid=1, heartbeat=began + 10)
    assert main(["runs", "rename", "fox", "hare", "--db", str(path)]) == 3
    said = capfd.readouterr().err
    assert "An older agentrl works on the run fox in" in said and "process 1 on" in said
    with Store.open(path, readonly=True) as store:
        assert store.runs.get("fox").alive
    with closing(sqlite3.connect(path)) as conn, conn:
        assert (
            conn.execute("SELECT count(*) FROM events").fetchone() == (0,)
            and schema_of(path) == schema
        )
        conn.execute(
            "UPDATE runs SET heartbeat=?", (began - 10,)
        )  # written before that process began: by another
    assert main(["runs", "rename", "fox", "hare", "--db", str(path)]) == 0
    assert schema_of(path) == SCHEMA_VERSION


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
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert f"from schema 7 to {SCHEMA_VERSION}" in process.stdout.readline()
        assert "still" in process.stdout.readline()  # it waits, inside the migration
        with pytest.raises(
            StoreError, match=rf"process {process.pid} on \S+, since \d\d:\d\d:\d\d, brings it"
        ):
            Store.open(path, busy_ms=20)
        with Store.open(path, readonly=True) as store:
            assert store.runs.get("fox").name == "fox"
        process.stdin.close()
        assert "Brought" in process.stdout.read()
    assert process.returncode == 0 and schema_of(path) == SCHEMA_VERSION
    with Store.open(path) as store:
        store.conn.execute("PRAGMA user_version")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked by another process"):
                store.conn.execute("PRAGMA busy_timeout=20")
                store.runs.update("r", step=2)


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
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path, copy = tmp_path / "agentrl.db", tmp_path / "there" / "agentrl.db"
    copy.parent.mkdir()
    with Store.open(path) as store:
        store.runs.add(RunRow("r", "fox"))
        shutil.copy(path, copy)
        for _ in range(2):  # SQLite leaves an empty log behind at the first
            assert main(["ls", "--db", str(copy)]) == 3
            said = capfd.readouterr().err
            assert f"its log {copy}-wal is missing" in said and "agentrl rollout" not in said
        shutil.copy(f"{path}-wal", f"{copy}-wal")
        assert main(["runs", "--json", "--db", str(copy)]) == 0 and "fox" in capfd.readouterr().out
        Path(f"{copy}-wal").unlink()

        store.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.episodes.add([Episode("e", "t", run_id="r", outcome=Outcome.FAILED)])
        shutil.copy(path, copy)  # a part of it is in the file, and its process lives
        backup(path, tmp_path / "backup.db")
        for place, warns in ((copy, True), (path, False), (tmp_path / "backup.db", False)):
            caplog.clear()
            with Store.open(place, readonly=True) as reader:
                assert len(reader.episodes.ids()) == (0 if warns else 1)
            assert (
                f"fox is running, and the log {place}-wal is missing" in caplog.text
            ) is warns, place
        data = bytearray(copy.read_bytes())
        data[4096:] = b"\xa5" * (len(data) - 4096)
        copy.write_bytes(data)
        with pytest.raises(StoreError, match="damaged") as damaged:
            Store.open(copy, readonly=True).runs.all()
        assert f"Copy {copy}-wal with it" in damaged.value.hint


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
    done = subprocess.run(
        [sys.executable, "-c", NO_LOCKS, *command, "--db", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 3 and "has no file locks" in done.stderr and "local disk" in done.stderr
    ), done.stderr
    assert "backup" not in done.stderr


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
    unkeyed_store(path, 400)
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
    unkeyed_store(path)
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
