"""Maintenance: sizes, backup while others write, pruning token arrays, vacuum, deleting a run with its folder."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from agentrl_cli.errors import UsageError, suggest, writing
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.codec import SIGNALS, marks
from agentrl_cli.store.connection import connect
from agentrl_cli.store.episode_sql import DROP_IMAGES
from agentrl_cli.store.file import batches
from agentrl_cli.store.filters import compile_filter
from agentrl_cli.store.holder import Holder
from agentrl_cli.store.schema import SCHEMA_VERSION
from agentrl_cli.store.sqlite_errors import map_errors
from agentrl_cli.types import TOP_K

_FLOATS = ("logp_sampled", "logp_policy", "entropy", "top_logps", *SIGNALS)
_ALL = (*_FLOATS, "top_ids", "clipped", "support")

WHAT: dict[str, str] = {
    "half": "keep everything, numbers in half precision",
    "alternatives": "drop the five most likely alternatives of each token",
    "numbers": "drop all numbers per token; ids, origins and texts stay",
    "episodes": "delete the episodes altogether",
}
"""What `prune` can drop, the least first."""

KEEP: dict[str, str] = {
    "best": "e.reward >= (SELECT max(s.reward) FROM episodes s WHERE s.group_id=e.group_id AND s.run_id IS e.run_id)",
    "worst": "e.reward <= (SELECT min(s.reward) FROM episodes s WHERE s.group_id=e.group_id AND s.run_id IS e.run_id)",
    "flagged": "e.flags <> ''",
    "tagged": "e.id IN (SELECT episode_id FROM tags)",
    "noted": "e.id IN (SELECT episode_id FROM notes)",
    "eval": "e.kind = 'eval'",
}
"""Episodes that `prune` can keep: best or worst of each group, flagged, tagged, noted, evaluations."""


@dataclass(frozen=True, slots=True)
class Status:
    """Sizes and counts of a store."""

    path: str
    bytes: int
    wal_bytes: int
    free_bytes: int
    """Unused inside the file; `vacuum` gives them back."""
    schema: int
    known_schema: int
    rows: dict[str, int]
    token_bytes: int
    """Size of the per-token arrays, estimated from 1,000 turns."""
    running: int
    """Episodes without an end whose process lives."""
    interrupted: int
    """Those whose process has died."""
    check: str
    """`ok`, or the findings of SQLite's quick check; empty if it did not run."""


def status(path: Path, *, check: bool = False) -> Status:
    """Return the sizes and counts of a store. Raises StoreError, NotFound."""
    with closing(connect(path, readonly=True)) as conn, map_errors(path):

        def one(sql: str) -> int:
            return int(conn.execute(sql).fetchone()[0] or 0)

        tables = conn.execute(
            "SELECT name FROM sqlite_master WHERE type='table' AND name GLOB '[a-z]*'"
            " AND name NOT GLOB 'sqlite*' ORDER BY rowid"
        )
        rows = {name: one(f'SELECT count(*) FROM "{name}"') for (name,) in tables.fetchall()}
        lengths = "+".join(f"ifnull(length({column}),0)" for column in ("ids", "origin", *_ALL))
        mean = one(
            f"SELECT avg({lengths}) FROM (SELECT * FROM turn_tokens ORDER BY rowid DESC LIMIT 1000)"
        )
        open_episodes = one("SELECT count(*) FROM episodes WHERE outcome IS NULL")
        interrupted = _count_interrupted(conn) if open_episodes else 0
        wal = Path(f"{path}-wal")
        return Status(
            path=str(path),
            bytes=path.stat().st_size,
            wal_bytes=wal.stat().st_size if wal.exists() else 0,
            free_bytes=one("PRAGMA page_size") * one("PRAGMA freelist_count"),
            schema=one("PRAGMA user_version"),
            known_schema=SCHEMA_VERSION,
            rows=rows,
            token_bytes=mean * rows["turn_tokens"],
            running=open_episodes - interrupted,
            interrupted=interrupted,
            check="; ".join(_find_problems(conn)) if check else "",
        )


def _count_interrupted(conn: sqlite3.Connection) -> int:
    """Return how many episodes have not ended though their run's process has; 0 in a store that is too old to tell."""
    if "claim" not in {row[1] for row in conn.execute("PRAGMA table_info(runs)")}:
        return 0
    sql = """SELECT count(*), r.status='running' AND r.claim=r.kind, r.heartbeat, r.pid, r.pid_started, r.boot, r.host
             FROM episodes e JOIN runs r ON r.id=e.run_id WHERE e.outcome IS NULL GROUP BY r.id"""
    rows = conn.execute(sql).fetchall()
    return sum(count for count, held, beat, *who in rows if not (held and Holder(*who).lives(beat)))


def _find_problems(conn: sqlite3.Connection) -> list[str]:
    """Return findings of SQLite's quick check, and how many rows refer to nothing; `ok` without either."""
    found = [str(row[0]) for row in conn.execute("PRAGMA quick_check(5)")]
    lost = Counter((row[0], row[2]) for row in conn.execute("PRAGMA foreign_key_check"))
    missing = [
        f"{count} rows of {table} refer to missing {parent}"
        for (table, parent), count in lost.items()
    ]
    return missing if missing and found == ["ok"] else found + missing


def backup(path: Path, target: Path) -> int:
    """Copy a store, compacted, while others go on writing. Returns its bytes. Raises UsageError, StoreError."""
    if target.exists():
        raise UsageError(
            f"{target} exists already.", hint="Choose another name: a backup never overwrites."
        )
    if not target.parent.is_dir():
        raise UsageError(f"No folder {target.parent}.", hint="Create it first.")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with (
            closing(connect(path, readonly=True)) as conn,
            writing(f"the store {target}"),
            map_errors(target),
        ):
            conn.execute("PRAGMA query_only=OFF")  # the file itself is open for reading only
            conn.execute("VACUUM INTO ?", (str(part),))
            part.replace(target)
    finally:
        with suppress(OSError):  # absent if nothing could be written
            part.unlink()
    return target.stat().st_size


def vacuum(path: Path) -> tuple[int, int]:
    """Give unused space back to the disk. Returns the bytes before and after. Raises StoreError during a write."""
    with closing(connect(path, busy_ms=2_000)) as conn, map_errors(path):
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        before = path.stat().st_size
        for sql in ("VACUUM", "PRAGMA optimize", "PRAGMA wal_checkpoint(TRUNCATE)"):
            conn.execute(sql)
    return before, path.stat().st_size


def prunable(
    store: Store,
    *,
    older_days: float | None = None,
    keep: Collection[str] = (),
    filter: str = "",
    run: str | None = None,
) -> list[str]:
    """Return the ids of the finished episodes that `prune` would change: not those of the steps that a training has
    yet to make, or would make again if it were resumed. Raises UsageError for an unknown word in `keep`.
    """
    where, params = compile_filter(filter)
    saved = (
        "SELECT coalesce(max(c.step), r.step) FROM runs r LEFT JOIN checkpoints c ON c.run_id=r.id"
        " WHERE r.id=e.run_id"
    )
    terms = [
        "e.outcome IS NOT NULL",
        f"({where})",
        f"NOT coalesce(e.kind='train' AND e.step > ({saved}), 0)",
    ]
    if older_days is not None:
        terms.append("e.started < ?")
        params = [*params, time.time() - older_days * 86_400]
    if run is not None:
        terms.append("e.run_id = ?")
        params = [*params, run]
    for word in keep:
        if word not in KEEP:
            raise UsageError(f"Unknown --keep {word!r}.", hint=suggest(word, KEEP))
        terms.append(f"NOT coalesce({KEEP[word]}, 0)")
    return [
        str(row[0])
        for row in store.select(f"SELECT e.id FROM episodes e WHERE {' AND '.join(terms)}", params)
    ]


def prune(store: Store, episode_ids: Collection[str], what: str = "numbers") -> int:
    """Drop the per-token arrays of episodes, or the episodes; see WHAT. Returns how many episodes changed.

    New rows reuse the space at once; `vacuum` gives it back to the disk. Raises UsageError, StoreError.
    """
    if what not in WHAT:
        raise UsageError(f"Unknown --what {what!r}.", hint=f"There are: {', '.join(WHAT)}.")
    if what == "episodes":
        count = sum(store.episodes.delete(part) for part in batches(episode_ids))
        store.write(DROP_IMAGES, ())
        return count
    for part in batches(episode_ids, 200):  # short transactions: a training may be writing
        with store.transaction() as conn:
            if what == "half":
                _halve(conn, part)
            else:
                columns = ("top_ids", "top_logps") if what == "alternatives" else _ALL
                sets = ", ".join(f"{column}=NULL" for column in columns)
                conn.execute(
                    f"UPDATE turn_tokens SET {sets} WHERE episode_id IN ({marks(len(part))})", part
                )
    return len(episode_ids)


def _halve(conn: sqlite3.Connection, episode_ids: list[str]) -> None:
    sql = f"SELECT rowid, n, {','.join(_FLOATS)} FROM turn_tokens WHERE episode_id IN ({marks(len(episode_ids))})"
    sets = ", ".join(f"{name}=?" for name in _FLOATS)
    for rowid, n, *blobs in conn.execute(sql, episode_ids).fetchall():
        halved = []
        for name, blob in zip(_FLOATS, blobs, strict=True):
            if blob and len(blob) == 4 * n * (TOP_K if name == "top_logps" else 1):
                with np.errstate(over="ignore"):
                    blob = np.frombuffer(blob, "<f4").astype("<f2").tobytes()
            halved.append(blob)
        conn.execute(f"UPDATE turn_tokens SET {sets} WHERE rowid=?", (*halved, rowid))


def run_folder(db: Path | str, run: RunRow) -> Path | None:
    """Return the folder to delete with a run: it lies beside the store, and no other store there (a backup) has the
    run.
    """
    folder, home = Path(run.dir).resolve(), Path(db).resolve().parent
    if not run.dir or not folder.is_dir() or folder.parent != home:
        return None
    for file in {path.resolve() for path in home.glob("*.db")} - {Path(db).resolve()}:
        uri = f"file:{quote(os.fsencode(file))}?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True)) as conn:  # a store
            if conn.execute("SELECT 1 FROM runs WHERE id=?", (run.id,)).fetchone():
                return None
    return folder


def delete_run(store: Store, run: RunRow, *, keep_files: bool = False, force: bool = False) -> int:
    """Delete a run with its episodes and its folder. Returns the number of deleted episodes.

    Raises UsageError if another process holds the run, unless `force`; StoreError, OSError.
    """
    if not force:
        store.claims.take(run.id, "db delete")
    folder = None if keep_files else run_folder(store.path, run)
    count = store.runs.delete(run.id)
    if folder is not None:
        shutil.rmtree(folder)
    return count
