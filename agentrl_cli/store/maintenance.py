"""Looking after a store: what is in it, a backup while it is written, dropping old token arrays, giving space back."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl_cli.errors import UsageError, nearest, writing
from agentrl_cli.store.base import batches
from agentrl_cli.store.codec import marks
from agentrl_cli.store.connection import connect, mapped
from agentrl_cli.store.filters import compile_filter
from agentrl_cli.store.schema import SCHEMA_VERSION
from agentrl_cli.types import TOP_K

if TYPE_CHECKING:
    from agentrl_cli.store import Store

_SAMPLED = ("logp_sampled", "logp_policy", "entropy", "top_logps")
_TRAINED = ("advantage", "logp_train", "ratio", "weight", "logp_ref", "value", "returns")
_FLOATS = (*_SAMPLED, *_TRAINED)
_ALL = (*_FLOATS, "top_ids", "clipped")

WHAT: dict[str, str] = {
    "half": "keep everything, numbers in half precision",
    "alternatives": "drop the five most likely alternatives of each token",
    "numbers": "drop all numbers per token; ids, origins and texts stay",
    "episodes": "delete the episodes altogether",
}
"""What `prune` can do, the mildest first."""

KEEP: dict[str, str] = {
    "best": "e.reward >= (SELECT max(s.reward) FROM episodes s WHERE s.group_id=e.group_id AND s.run_id IS e.run_id)",
    "worst": "e.reward <= (SELECT min(s.reward) FROM episodes s WHERE s.group_id=e.group_id AND s.run_id IS e.run_id)",
    "flagged": "e.flags <> ''",
    "tagged": "e.id IN (SELECT episode_id FROM tags)",
    "noted": "e.id IN (SELECT episode_id FROM notes)",
    "eval": "e.kind = 'eval'",
}
"""Episodes that `prune` can spare: the best or worst of each group, those with a flag, a tag, a note, evaluations."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a store holds."""

    path: str
    bytes: int
    wal_bytes: int
    free_bytes: int
    """Inside the file: `vacuum` gives them back."""
    schema: int
    known_schema: int
    rows: dict[str, int]
    token_bytes: int
    """What the arrays per token take; an estimate from a sample of 1,000 turns."""
    running: int
    check: str
    """`ok`, or what SQLite's quick check found; empty where it was not asked for."""


def status(path: Path, *, check: bool = False) -> Status:
    """Sizes and counts of a store. Raises StoreError, NotFound."""
    conn = connect(path, readonly=True)
    try:
        with mapped(path):

            def one(sql: str) -> int:
                return int(conn.execute(sql).fetchone()[0] or 0)

            rows = {name: one(f'SELECT count(*) FROM "{name}"') for name in _tables(conn)}
            lengths = "+".join(f"ifnull(length({column}),0)" for column in ("ids", "origin", *_ALL))
            mean = one(f"SELECT avg({lengths}) FROM (SELECT * FROM turn_tokens ORDER BY rowid DESC LIMIT 1000)")
            page = one("PRAGMA page_size")
            found = [row[0] for row in conn.execute("PRAGMA quick_check(5)")] if check else []
            wal = Path(f"{path}-wal")
            return Status(
                path=str(path),
                bytes=path.stat().st_size,
                wal_bytes=wal.stat().st_size if wal.exists() else 0,
                free_bytes=page * one("PRAGMA freelist_count"),
                schema=one("PRAGMA user_version"),
                known_schema=SCHEMA_VERSION,
                rows=rows,
                token_bytes=mean * rows["turn_tokens"],
                running=one("SELECT count(*) FROM episodes WHERE outcome IS NULL"),
                check="; ".join(found),
            )
    finally:
        conn.close()


def _tables(conn: sqlite3.Connection) -> list[str]:
    sql = "SELECT name FROM sqlite_master WHERE type='table' AND name GLOB '[a-z]*' AND name NOT GLOB 'sqlite*'"
    return [str(row[0]) for row in conn.execute(f"{sql} ORDER BY rowid")]


def backup(path: Path, target: Path) -> int:
    """Copy a store, compacted, while others go on writing. Returns its bytes. Raises UsageError, StoreError."""
    if target.exists():
        raise UsageError(f"{target} exists already.", hint="Choose another name: a backup never overwrites.")
    if not target.parent.is_dir():
        raise UsageError(f"There is no folder {target.parent}.")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    conn = connect(path, readonly=True)
    try:
        with writing(f"the store {target}"), mapped(target):
            conn.execute("PRAGMA query_only=OFF")  # the file itself is open for reading only
            conn.execute("VACUUM INTO ?", (str(part),))
            part.replace(target)
    finally:
        conn.close()
        with suppress(OSError):  # where nothing could be written there is nothing to remove
            part.unlink()
    return target.stat().st_size


def vacuum(path: Path) -> tuple[int, int]:
    """Give unused space back. Returns the bytes before and after. Raises StoreError where somebody is writing."""
    conn = connect(path, busy_ms=2_000)
    try:
        with mapped(path):
            conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            before = path.stat().st_size
            conn.execute("VACUUM")
            conn.execute("PRAGMA optimize")
            conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        conn.close()
    return before, path.stat().st_size


def prunable(
    store: Store,
    *,
    older_days: float | None = None,
    keep: Collection[str] = (),
    filter: str = "",
    run: str | None = None,
) -> list[str]:
    """The ids of the finished episodes that `prune` would touch. Raises UsageError for an unknown word in `keep`."""
    where, params = compile_filter(filter)
    terms = ["e.outcome IS NOT NULL", f"({where})"]
    if older_days is not None:
        terms.append("e.started < ?")
        params = [*params, time.time() - older_days * 86_400]
    if run is not None:
        terms.append("e.run_id = ?")
        params = [*params, run]
    for word in keep:
        if word not in KEEP:
            near = nearest(word, KEEP)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(KEEP)}."
            raise UsageError(f"--keep does not know {word!r}.", hint=hint)
        terms.append(f"NOT coalesce({KEEP[word]}, 0)")
    return [str(row[0]) for row in store._rows(f"SELECT e.id FROM episodes e WHERE {' AND '.join(terms)}", params)]


def prune(store: Store, episode_ids: Collection[str], what: str = "numbers") -> int:
    """Drop the per-token arrays of episodes, or the episodes; see WHAT. Returns how many episodes changed.

    The space is free for new rows at once; `vacuum` gives it back to the disk. Raises UsageError, StoreError.
    """
    if what not in WHAT:
        raise UsageError(f"--what does not know {what!r}.", hint=f"There are: {', '.join(WHAT)}.")
    if what == "episodes":
        return sum(store.delete_episodes(part) for part in batches(episode_ids))
    for part in batches(episode_ids, 200):  # short transactions: a training may be writing
        with store.transaction() as conn:
            if what == "half":
                _halve(conn, part)
            else:
                columns = ("top_ids", "top_logps") if what == "alternatives" else _ALL
                sets = ", ".join(f"{column}=NULL" for column in columns)
                conn.execute(f"UPDATE turn_tokens SET {sets} WHERE episode_id IN ({marks(len(part))})", part)
    return len(episode_ids)


def _halve(conn: sqlite3.Connection, episode_ids: list[str]) -> None:
    sql = f"SELECT rowid, n, {','.join(_FLOATS)} FROM turn_tokens WHERE episode_id IN ({marks(len(episode_ids))})"
    sets = ", ".join(f"{name}=?" for name in _FLOATS)
    for rowid, n, *blobs in conn.execute(sql, episode_ids).fetchall():
        halved = []
        for name, blob in zip(_FLOATS, blobs, strict=True):
            single = blob and len(blob) == 4 * n * (TOP_K if name == "top_logps" else 1)
            halved.append(_half(blob) if single else blob)
        conn.execute(f"UPDATE turn_tokens SET {sets} WHERE rowid=?", (*halved, rowid))


def _half(blob: bytes) -> bytes:
    with np.errstate(over="ignore"):
        return np.frombuffer(blob, "<f4").astype("<f2").tobytes()
