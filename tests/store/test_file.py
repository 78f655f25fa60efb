"""The store as a file: newer and foreign files, damage, a full disk, locks, several processes, `kill -9`.

Episodes that run wait in memory for a moment: no reader sees a difference, and `kill -9` takes that moment alone.
"""

import contextlib
import ctypes
import os
import re
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlite_utils import Database
from sqlite_utils.db import Table

from agentrl_cli.errors import NotFound, StoreError
from agentrl_cli.store import EpisodeRow, RunRow, Store
from agentrl_cli.store.buffer import LINGER
from agentrl_cli.store.connection import connect
from agentrl_cli.store.migration import migrate
from agentrl_cli.store.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from agentrl_cli.types import (
    AgentState,
    Drift,
    Episode,
    Outcome,
    RewardPart,
    Tokens,
    ToolResult,
    Turn,
    new_id,
)
from tests.helpers.processes import comes
from tests.helpers.train import spawn, spawn_well, start_code, write_project
from tests.helpers.trees import Said
from tests.helpers.trees import episode as said_episode
from tests.store.test_store import random_episode, same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agentrl.db"


@pytest.fixture
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    Store.open(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        yield conn


def episode_of(n: int) -> Episode:
    return said_episode([Said("user", range(200))], new_id(), float(n), started=1.0)


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
def test_files_that_are_newer_or_not_stores_are_refused_and_left_alone(
    path: Path, raw: sqlite3.Connection, readonly: bool
) -> None:
    raw.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    raw.close()
    text, other = (path.with_name(name) for name in ("text.db", "other.db"))
    text.write_text("model: tiny\n" * 100)
    with closing(sqlite3.connect(other)) as conn, conn:
        conn.execute("CREATE TABLE mine (a)")
    for file, said, do in (
        (path, "newer agentrl", "Upgrade"),
        (text, "not a SQLite file", ""),
        (other, "not an agentrl store", ""),
    ):
        before = file.read_bytes()
        with pytest.raises(StoreError, match=said) as refused:
            Store.open(file, readonly=readonly)
        assert do in refused.value.hint and refused.value.exit_code == 3
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
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        # As while a process recovers the log, or is the last to close the file.
        other.execute("UPDATE runs SET kind='train'")
        release = threading.Timer(0.2, other.close)
        release.start()
        with Store.open(path, readonly=True) as store:
            assert [run.name for run in store.runs.all()] == ["a"]
        release.join()


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
path, name = sys.argv[1:]
with Store.open(path) as store:
    run = store.runs.add(RunRow(id=name, name="shared"))
    for n in range(25):
        episode = Episode(new_id(), "t", run_id=run.id, step=n, group_id="g", started=1.0)
        store.episodes.start(episode)
        turns, end = [], 0
        for index in range(3):
            size = 50 + 10 * index
            turn = Turn(index, "user", ({"role": "user", "content": f"{name} {n} {index}"},), end, end + size)
            store.live.set(episode.id, AgentState.GENERATING, index, "text")
            store.episodes.add_turn(episode.id, turn, Tokens.from_ids([n] * size, [2] * size))
            turns.append(turn)
            end += size
        tokens = Tokens.from_ids([n] * end, [2] * end)
        parts = (RewardPart("r", float(n)),)
        done = episode.with_(turns=tuple(turns), tokens=tokens, reward_parts=parts, outcome=Outcome.FAILED)
        store.episodes.finish(done)
        store.journal.add_log(run.id, "info", f"line {n}")
"""


def test_two_processes_create_and_share_one_store(path: Path) -> None:
    for writer in [
        start_code(path.parent, WRITER, str(path), name, log=f"{name}.txt")
        for name in ("one", "two")
    ]:
        assert writer.end() == (0, "")
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


# --- episodes that run ---


@pytest.fixture
def store(store: Store) -> Store:
    store.runs.add(RunRow(id="r1", name="a"))
    store.tokenizers.add("hash", "{}")
    return store


def begun(episode: Episode) -> Episode:
    return episode.with_(
        turns=(), tokens=Tokens.empty(), reward_parts=(), outcome=None, fact="", advantage=None
    )


def part(episode: Episode, turn: Turn) -> Tokens:
    return episode.tokens.slice(turn.start, turn.end)


@pytest.mark.parametrize("seed", range(12))
def test_whenever_it_is_written_it_comes_back_equal(store: Store, seed: int) -> None:
    rng = np.random.default_rng(seed)
    episodes = [
        random_episode(rng, run_id="r1", step=1, group_id="g", sample=n, kind="train")
        for n in range(6)
    ]
    with Store.open(store.path, readonly=True) as watcher:
        for episode in episodes:
            store.episodes.start(begun(episode), split="train", tokenizer="hash")
        for index in range(max(len(episode.turns) for episode in episodes) + 1):
            for episode in episodes:
                if index < len(episode.turns):
                    turn, later = episode.turns[index], bool(rng.random() < 0.9)
                    store.live.set(episode.id, AgentState.GENERATING, index, "text")
                    for _ in range(1 + (rng.random() < 0.1)):  # again with its reward, say
                        store.episodes.add_turn(episode.id, turn, part(episode, turn), later=later)
                elif index == len(episode.turns):
                    store.episodes.finish(episode, later=bool(rng.random() < 0.8))
                match rng.integers(8):
                    case 0:
                        store.flush()
                        rows = watcher.episodes.rows(watcher.episodes.ids())
                        assert len(rows) == 6
                        for row in rows:
                            seen = watcher.episodes.get(row.id)
                            check_counts(row, seen)
                            assert seen.turns == episodes[row.sample].turns[: row.n_turns]
                    case 1:
                        store.flush_ended()
                    case 2:
                        store.marks.note(episode.id, "noted")
                    case 3:
                        assert store.episodes.row(episode.id).id == episode.id
        store.flush()
        store.episodes.finish(at_once := random_episode(rng, run_id="r1", sample=6))
        for episode in (*episodes, at_once):
            assert same(watcher.episodes.get(episode.id), episode)
            row = watcher.episodes.row(episode.id)
            check_counts(row, episode)
            assert row.reward == pytest.approx(0.3 - 0.3) and row.primary_score == 0.1 + 0.2
            assert (row.flags, row.fact) == (("LOOP", "BADARG"), "trained")
            assert row.seconds == pytest.approx(3.176544, abs=1e-6)
        rows = watcher.episodes.rows(watcher.episodes.ids("", "time"))
        assert {(row.split, row.tokenizer) for row in rows if row.step} == {("train", "hash")}
        assert watcher.live.all() == []
    assert store.select("PRAGMA foreign_key_check") == []


def check_counts(row: EpisodeRow, episode: Episode) -> None:
    """A list's row of an episode counts what is there of it."""
    wanted = {
        "n_turns": len(episode.turns),
        "n_tokens": len(episode.tokens),
        "n_model_tokens": episode.trained_tokens,
        "n_calls": episode.tool_calls,
        "n_tool_errors": episode.tool_errors,
    }
    assert {name: getattr(row, name) for name in wanted} == wanted


def test_one_that_ends_soon_is_written_once_and_the_others_wait(store: Store) -> None:
    rng = np.random.default_rng(3)
    short, long = (random_episode(rng, run_id="r1", sample=n) for n in range(2))
    with Store.open(store.path, readonly=True) as watcher:
        for episode in (short, long):
            store.episodes.start(begun(episode))
            for turn in episode.turns:
                store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)
        store.marks.add_drift(short.id, Drift("structural", 0, 9, "a", "b"))
        store.episodes.finish(short, later=True)
        assert watcher.episodes.ids() == []
        store.flush_ended()
        assert [row.id for row in watcher.episodes.rows(watcher.episodes.ids())] == [short.id]
        assert same(watcher.episodes.get(short.id), short) and watcher.live.all() == []
        (drift,) = watcher.marks.drift(short.id)  # it decides whether that is trained
        assert (drift.kind, drift.position) == ("structural", 9)
        store.flush()
        assert [row.episode_id for row in watcher.live.all()] == [long.id]
        assert watcher.episodes.get(long.id).turns == long.turns
        assert len(watcher.marks.drift(short.id)) == 1


def test_a_watcher_sees_what_runs_within_a_second(store: Store) -> None:
    episode = random_episode(np.random.default_rng(5))
    with Store.open(store.path, readonly=True) as watcher:
        store.episodes.start(begun(episode))
        store.live.set(episode.id, AgentState.PROCESSING_TOOLS, 0, "x" * 9000)
        store.episodes.add_turn(
            episode.id, episode.turns[0], part(episode, episode.turns[0]), later=True
        )
        store.journal.add_log("r1", "info", "hello")
        assert LINGER < 1 and watcher.journal.logs("r1") == []
        assert comes(lambda: bool(watcher.live.all() and watcher.journal.logs("r1")))
        live = [(row.state, row.text, row.task_id) for row in watcher.live.all()]
        assert live == [("processing_tools", "x" * 4000, "calc/1")]
        assert [line["text"] for line in watcher.journal.logs("r1")] == ["hello"]
        seen = watcher.episodes.get(episode.id)
        assert (seen.turns, seen.outcome) == (episode.turns[:1], None)
        with pytest.raises(StoreError, match="reading only"):
            watcher.journal.add_log("r1", "info", "no")


def test_a_transaction_that_fails_takes_nothing_that_waited(store: Store) -> None:
    episode = random_episode(np.random.default_rng(7))
    store.episodes.start(begun(episode))
    for turn in episode.turns:
        store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)
    with pytest.raises(RuntimeError), store.transaction():
        store.episodes.finish(episode)
        raise RuntimeError("crash")
    assert store.episodes.row(episode.id).outcome is None
    store.episodes.finish(episode, later=True)
    store.flush()
    assert same(store.episodes.get(episode.id), episode)


def test_an_end_with_other_turns_than_were_reported_is_what_counts(store: Store) -> None:
    rng = np.random.default_rng(0)
    episode = next(e for e in iter(lambda: random_episode(rng), None) if len(e.turns) > 3)
    store.episodes.start(begun(episode))
    for turn in episode.turns[1:]:
        store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)
    store.flush()
    *fewer, last = episode.turns
    shorter = episode.with_(turns=tuple(fewer), tokens=episode.tokens.slice(0, last.start))
    store.episodes.finish(shorter, later=True)
    assert same(store.episodes.get(episode.id), shorter)
    with pytest.raises(ValueError, match="no outcome"):
        store.episodes.finish(begun(episode), later=True)


@pytest.mark.parametrize("later", [True, False])
def test_a_turn_whose_span_is_not_that_of_its_tokens_is_refused(store: Store, later: bool) -> None:
    store.episodes.start(Episode("e1", "t"))
    with pytest.raises(ValueError, match=r"spans 0\.\.3 but has 0"):
        store.episodes.add_turn("e1", Turn(0, "user", (), 0, 3), Tokens.empty(), later=later)
    assert store.episodes.turns("e1") == []


def test_a_row_that_is_refused_is_reported_and_holds_nothing_back(store: Store) -> None:
    good, bad = (random_episode(np.random.default_rng(n)) for n in range(2))
    bad = bad.with_(run_id="nosuch")
    with pytest.raises(StoreError):
        store.episodes.finish(bad)
    for episode in (bad, good):
        store.episodes.start(begun(episode))
        store.episodes.finish(episode, later=True)
    store.flush()
    assert same(store.episodes.get(good.id), good)
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "next")
    odd = ToolResult("x", reward=object())  # type: ignore[arg-type]  # what SQLite has no column for
    store.episodes.start(Episode("e2", "t"))
    answer = Turn(0, "tool", (), 0, 0, results=(odd,))
    store.episodes.add_turn("e2", answer, Tokens.empty(), later=True)
    store.journal.add_log("nosuch", "info", "bad")
    store.journal.add_log(None, "info", "goes on")
    assert [line["text"] for line in store.journal.logs(None)] == ["next", "goes on"]
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "line")


def test_an_end_that_is_refused_leaves_nothing_of_itself(store: Store) -> None:
    episode = random_episode(np.random.default_rng(11), run_id="r1")
    store.episodes.start(begun(episode))
    store.flush()
    odd = RewardPart("odd", 0.0, fakeable=object())  # type: ignore[arg-type]  # what SQLite has no column for
    store.marks.add_drift(episode.id, Drift("structural", 0, 1, "a", "b"))
    store.episodes.finish(episode.with_(reward_parts=(RewardPart("good", 1.0), odd)), later=True)
    store.flush()
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "next")
    left = store.episodes.get(episode.id)
    assert (left.outcome, left.turns, store.marks.drift(episode.id)) == (None, (), [])


ENDLESS = """
import sys, time
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Outcome, RewardPart, Tokens, Turn, new_id
with Store.open(sys.argv[1]) as store:
    run = store.runs.add(RunRow(id="r", name="r"))
    while True:
        tokens = Tokens.from_ids([1] * 50, [2] * 50)
        episode = Episode(new_id(), "t", run_id=run.id, started=1.0)
        store.episodes.start(episode)
        turn = Turn(0, "user", ({"role": "user", "content": "x"},), 0, 50)
        store.episodes.add_turn(episode.id, turn, tokens, later=True)
        print(episode.id, flush=True)
        store.episodes.finish(episode.with_(turns=(turn,), tokens=tokens, outcome=Outcome.FAILED), later=True)
        time.sleep(0.01)
"""


def test_kill_9_takes_no_more_than_the_last_moment(tmp_path: Path) -> None:
    writer = start_code(tmp_path, ENDLESS, str(tmp_path / "a.db"))
    writer.line("")  # the store has been made
    with Store.open(tmp_path / "a.db", readonly=True) as watcher:
        ended = "SELECT count(*) FROM episodes WHERE outcome IS NOT NULL"
        assert comes(
            lambda: watcher.conn.execute(ended).fetchone()[0] > 20, writer.process.is_alive
        )
        visible = watcher.conn.execute(ended).fetchone()[0]
    writer.process.kill()
    seen = writer.end()[1].split()
    with Store.open(tmp_path / "a.db") as store:
        assert store.conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        stored = {row.id: row for row in store.episodes.rows(store.episodes.ids())}
        whole = [one for one in seen if one in stored and stored[one].outcome is Outcome.FAILED]
        assert len(whole) >= visible and whole == seen[: len(whole)]
        assert all(len(store.episodes.get(one).turns) == 1 for one in whole)
