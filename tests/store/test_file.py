"""The store as a file: newer and foreign files, damage, a full disk, locks, several processes, `kill -9`."""

import contextlib
import ctypes
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database
from sqlite_utils.db import Table

from agentrl_cli.errors import NotFound, StoreError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.connection import connect
from agentrl_cli.store.migration import migrate
from agentrl_cli.store.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from agentrl_cli.types import Episode, Origin, Outcome, RewardPart, Tokens, Turn, new_id
from tests.helpers.processes import comes
from tests.helpers.train import spawn, spawn_well, write_project


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agentrl.db"


@pytest.fixture
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    Store.open(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        yield conn


def episode_of(n: int) -> Episode:
    tokens = Tokens.from_ids(range(200), [Origin.USER] * 200)
    turn = Turn(0, "user", ({"role": "user", "content": f"episode {n}"},), 0, 200)
    parts, failed = (RewardPart("r", float(n)),), Outcome.FAILED
    one = Episode(new_id(), "t", turns=(turn,), tokens=tokens, reward_parts=parts, outcome=failed)
    return one.with_(started=1.0)


def test_a_new_store_is_wal_strict_and_named(path: Path) -> None:
    pragmas = {
        "journal_mode": "wal",
        "synchronous": 1,
        "foreign_keys": 1,
        "application_id": APPLICATION_ID,
        "user_version": SCHEMA_VERSION,
    }
    with Store.open(path) as store:
        db = Database(store.conn)
        assert {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas} == pragmas
        wanted = (
            "runs steps tasks groups episodes turns tool_calls reward_parts turn_tokens evals checkpoints live logs"
            " events alerts controls drift tokenizers attachments tags notes score_sets scores workers"
        )
        ours = {name for name in db.table_names() if not name.startswith(("_", "sqlite"))}
        assert ours == set(wanted.split()) and all(Table(db, name).strict for name in ours)
        assert set(db.view_names()) == {"v_episodes", "v_groups", "v_turns"}
        assert all(db.execute(f"SELECT * FROM {v}").fetchall() == [] for v in db.view_names())


def test_a_new_store_is_as_the_migrations_make_it() -> None:
    with (
        closing(sqlite3.connect(":memory:", isolation_level=None)) as new,
        closing(sqlite3.connect(":memory:", isolation_level=None)) as migrated,
    ):
        migrate(new)
        migrate(migrated, tuple([*MIGRATIONS]))
        schema = (
            "SELECT type, name, tbl_name, trim(sql, char(10)) FROM sqlite_schema ORDER BY rowid"
        )
        wanted = migrated.execute(schema).fetchall()
        script = "".join(
            f"{sql};\n" for _, name, _, sql in wanted if sql and "sqlite_" not in name[:7]
        )
        assert new.execute(schema).fetchall() == wanted, f"store/schema.sql should be:\n{script}"
        names = "SELECT id, migration_set, name, length(applied_at) > 20 FROM _sqlite_migrations"
        assert new.execute(names).fetchall() == migrated.execute(names).fetchall()


def test_migrations_apply_once_in_order_and_all_or_none(path: Path) -> None:
    with Store.open(path) as store:
        store.runs.add(RunRow(id="r1", name="kept"))
    later = (*MIGRATIONS, ("m998_more", "ALTER TABLE runs ADD COLUMN extra TEXT;\n"))
    fails = "CREATE TABLE fine (a INTEGER) STRICT;\nCREATE TABLE runs (a INTEGER);\n"
    names = "SELECT name FROM _sqlite_migrations ORDER BY id"
    with closing(connect(path)) as conn:
        with pytest.raises(StoreError, match="table runs already exists"):
            migrate(conn, (*later, ("m999_broken", fails)))
        assert conn.execute(names).fetchall() == [(name,) for name, _ in MIGRATIONS]
        for _ in range(2):
            migrate(conn, later)
        assert conn.execute(names).fetchall() == [(name,) for name, _ in later]
        assert conn.execute("SELECT name, extra FROM runs").fetchall() == [("kept", None)]


@pytest.mark.parametrize("readonly", [True, False])
def test_a_newer_file_is_refused_and_left_alone(
    path: Path, raw: sqlite3.Connection, readonly: bool
) -> None:
    raw.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    raw.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer agentrl") as refused:
        Store.open(path, readonly=readonly)
    assert "Upgrade" in refused.value.hint and refused.value.exit_code == 3
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [True, False])
def test_files_that_are_not_stores_are_refused(path: Path, readonly: bool) -> None:
    other = path.with_name("other.db")
    path.write_text("model: tiny\n" * 100)
    with closing(sqlite3.connect(other)) as conn, conn:
        conn.execute("CREATE TABLE mine (a)")
    for file, said in ((path, "not a SQLite file"), (other, "not an agentrl store")):
        before = file.read_bytes()
        with pytest.raises(StoreError, match=said):
            Store.open(file, readonly=readonly)
        assert file.read_bytes() == before


def test_missing_and_empty_files(path: Path) -> None:
    with pytest.raises(NotFound, match="No store at"):
        Store.open(path, readonly=True)
    assert not path.exists()
    path.touch()
    with pytest.raises(StoreError, match="is empty"):
        Store.open(path, readonly=True)
    with Store.open(path) as store:
        store.close()  # and again with the end of the block
    with Store.open(path, readonly=True) as store:
        assert store.runs.all() == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"the folder of the store .* could not be written"):
        Store.open(tmp_path / "file" / "agentrl.db")


def full(store: Store) -> None:
    """Leave the store no room for another page."""
    ((pages,),) = store.select("PRAGMA page_count")
    store.conn.execute(f"PRAGMA max_page_count={pages}")


def test_a_full_disk_loses_nothing_that_was_written(path: Path) -> None:
    with Store.open(path) as store:
        store.episodes.finish(first := episode_of(0))
        full(store)
        store.journal.add_log(None, "info", "queued")
        with pytest.raises(StoreError, match="disk is full") as caught:
            for n in range(100):
                store.episodes.finish(episode_of(n))
        assert "prune" in caught.value.hint and store.episodes.get(first.id).reward == 0.0
        store.conn.execute("PRAGMA max_page_count=100000")
        store.episodes.finish(episode_of(7))  # there is space again: it goes on
        assert store.journal.logs(None)[0]["text"] == "queued"
        assert store.select("PRAGMA integrity_check") == [("ok",)]


def test_a_full_disk_in_the_background_is_reported_by_the_next_write(path: Path) -> None:
    with Store.open(path) as store:
        full(store)
        store.journal.add_log(None, "info", "x" * 100_000)
        assert comes(lambda: store.buffer.failure is not None)
        with pytest.raises(StoreError, match="disk is full"):
            store.journal.add_log(None, "info", "y")
        store.conn.execute("PRAGMA max_page_count=100000")
        assert [len(line["text"]) for line in store.journal.logs(None)] == [100_000, 1]


def test_a_lock_is_waited_for_and_then_named(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9") / "agentrl.db"  # a name that is not UTF-8
    Store.open(path).close()
    given: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}
    with closing(sqlite3.connect(os.fsencode(path), **given)) as other:
        other.execute("BEGIN IMMEDIATE")
        with Store.open(path, busy_ms=50) as store:
            with pytest.raises(StoreError, match="locked by another process"):
                store.runs.add(RunRow(id="r1", name="a"))
            assert store.runs.all() == []  # reading still works
        other.execute("COMMIT")
        with Store.open(path) as store:
            other.execute("BEGIN IMMEDIATE")
            release = threading.Timer(0.2, other.execute, ["COMMIT"])
            release.start()
            store.runs.add(RunRow(id="r1", name="a"))
            release.join()
            assert [run.name for run in store.runs.all()] == ["a"]


def test_a_reader_cannot_write(path: Path, raw: sqlite3.Connection) -> None:
    with (
        Store.open(path, readonly=True) as reader,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        reader.conn.execute("DELETE FROM episodes")


WRITER = """
import sys
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import AgentState, Episode, Outcome, RewardPart, Tokens, Turn, new_id
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Store.open(path) as store:
    run = store.runs.add(RunRow(id=name, name="shared"))
    n = 0
    while n < count or count < 0:
        episode = Episode(new_id(), "t", run_id=run.id, step=n, group_id="g", started=1.0)
        store.episodes.start(episode)
        turns, end = [], 0
        for index in range(3):
            size = 50 + 10 * index
            turn = Turn(index, "user", ({"role": "user", "content": f"{name} {n} {index}"},), end, end + size)
            store.live.set(episode.id, AgentState.GENERATING, index, "text")
            store.episodes.add_turn(episode.id, turn, Tokens.from_ids([n] * size, [2] * size))
            print(episode.id, index, flush=True)
            turns.append(turn)
            end += size
        tokens = Tokens.from_ids([n] * end, [2] * end)
        parts = (RewardPart("r", float(n)),)
        done = episode.with_(turns=tuple(turns), tokens=tokens, reward_parts=parts, outcome=Outcome.FAILED)
        store.episodes.finish(done)
        store.journal.add_log(run.id, "info", f"line {n}")
        print(episode.id, "end", flush=True)
        n += 1
"""


def start(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_create_and_share_one_store(path: Path) -> None:
    for writer in [start(path, name, 25) for name in ("one", "two")]:
        writer.communicate()
        assert writer.returncode == 0
    with Store.open(path, readonly=True) as store:
        assert sorted(run.name for run in store.runs.all()) == ["shared", "shared-2"]
        for name in ("one", "two"):
            rows = store.episodes.rows(store.episodes.ids(run=name, sort="step"))
            assert [row.reward for row in rows] == list(range(25))
            lines = [line["text"] for line in store.journal.logs(name)]
            assert lines == [f"line {n}" for n in range(25)]
            for n in (0, 24):
                episode = store.episodes.get(rows[n].id)
                said = [turn.messages[0]["content"] for turn in episode.turns]
                assert said == [f"{name} {n} {k}" for k in range(3)]
                assert episode.tokens.ids.tolist() == [n] * 180
        assert store.live.all() == []


# --- real disks that are full or read-only ---


NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
RECURSIVE, PRIVATE, BIND, REMOUNT, READ_ONLY = 1 << 14, 1 << 18, 1 << 12, 1 << 5, 1
NOT_ALLOWED = 77


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        print(f"{name}: {os.strerror(number)}", flush=True)
        os._exit(NOT_ALLOWED)


def _own_mounts() -> None:
    """A mount namespace for this process, and one of users where it is not root's."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USERS)
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)


def small(folder: str, spare: int) -> None:
    """For a process that starts: what `folder` holds on a disk of its own, with `spare` KiB left."""
    _own_mounts()
    with tempfile.TemporaryDirectory() as aside:
        shutil.copytree(folder, aside, dirs_exist_ok=True)
        files = [path for path in Path(aside).rglob("*") if path.is_file()]
        pages = sum(-(-path.stat().st_size // 4096) for path in files)
        _call(
            "mount",
            b"none",
            os.fsencode(folder),
            b"tmpfs",
            0,
            f"size={4 * pages + spare}k".encode(),
        )
        shutil.copytree(aside, folder, dirs_exist_ok=True)


def read_only(folder: str) -> None:
    """For a process that starts: `folder` cannot be written to, by root neither."""
    _own_mounts()
    place = os.fsencode(folder)
    _call("mount", place, place, None, BIND, None)
    _call("mount", place, place, None, BIND | REMOUNT | READ_ONLY, None)
    os.chdir(folder)  # the same place on the new mount


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    train = {"steps": 2, "save_every": 1, "keep_last": 9}
    project = write_project(tmp_path_factory.mktemp("full") / "project", model, train=train)
    spawn_well(project, "train")
    (project / "small").mkdir()
    return project


def sentence(project: Path, command: str, before: Callable[[], None]) -> str:
    """What a command reports of a disk that is full or cannot be written to."""
    code, output = spawn(project, *command.split(), before=before)
    if code == NOT_ALLOWED:
        pytest.skip(f"no file system may be mounted here: {output}")
    assert code == 3, output
    for never in ("Traceback", "Something went wrong", "never retrieved"):
        assert never not in output
    assert output.lower().count("disk is") == 1, output
    (line,) = (line for line in output.splitlines() if line.startswith("Error: "))
    return line.removeprefix("Error: ")


@pytest.mark.parametrize(
    ("command", "folder", "spare", "what"),
    [
        ("train --resume last --steps 40", "runs", 20, "the store"),
        ("train --resume last --steps 40", "runs", 300, "the checkpoint"),
        ("merge last@2 small/out", "small", 30, "small/out"),
        ("db backup small/copy.db", "small", 30, "the store small/copy.db"),
        ("db prune --what half --keep= --yes", "runs", 0, "the store"),
        ("db vacuum", "runs", 0, "the store"),
    ],
)
def test_a_full_disk_is_one_sentence(
    trained: Path, command: str, folder: str, spare: int, what: str
) -> None:
    output = sentence(trained, command, partial(small, folder, spare))
    assert re.fullmatch(rf"The disk is full: {what}.*could not be written\.", output)


def filled(folder: str) -> None:
    """For a process that starts: what `folder` holds on a disk of its own, without room for the index of a log."""
    small(folder, 0)
    Path(folder, "agentrl.db-shm").unlink(missing_ok=True)
    with contextlib.suppress(OSError), open(f"{folder}/rest", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_disk_without_any_room_is_read_and_called_full(trained: Path) -> None:
    output = sentence(trained, "runs rename last other", partial(filled, "runs"))
    assert output.startswith("The disk is full: the store")
    code, output = spawn(trained, "ls", before=partial(filled, "runs"))
    assert code == 0 and "bandit-grpo" in output, output


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("train", "the store"),
        ("train --resume last --steps 3", ""),
        ("merge last@2 small/out", "small/out"),
        ("init code-task small/new", "small/new"),
        ("runs rename last other", "the store"),
        ("db vacuum", "the store"),
        ("db backup small/copy.db", "the store small/copy.db"),
    ],
)
def test_a_read_only_disk_is_called_that(trained: Path, command: str, what: str) -> None:
    output = sentence(trained, command, partial(read_only, str(trained)))
    assert re.fullmatch(rf"The disk is read-only: {what}.*could not be written\.", output)
