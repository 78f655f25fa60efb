"""Opening a SQLite file as a store.

Writers get WAL, `synchronous=NORMAL`, a busy timeout and foreign keys, and migrate an older file. Readers open
`mode=ro` and change nothing: an older file is read as it is. A file from a newer agentrl is refused.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from operator import methodcaller
from pathlib import Path
from urllib.parse import quote

import numpy as np

from agentrl_cli.errors import NotFound, StoreError, writing
from agentrl_cli.store.holder import Holder
from agentrl_cli.store.migration import add_views, bring_up, migrate
from agentrl_cli.store.schema import APPLICATION_ID, SCHEMA_VERSION
from agentrl_cli.store.sqlite_errors import (
    COPY_BOTH,
    ELSEWHERE,
    lacks_locks,
    lacks_log,
    lacks_room,
    map_errors,
)

_LOG = logging.getLogger("agentrl.store")
BUSY_MS = 30_000
WAL_PAGES = 4_000
"""Pages of write-ahead log (16 MB) between two checkpoints: each costs a sync to disk."""


for _kind in (np.int8, np.int32, np.int64, np.bool_, np.float32):
    sqlite3.register_adapter(_kind, methodcaller("item"))  # rows may hold numpy numbers


def connect(
    path: Path | str, *, readonly: bool = False, busy_ms: int = BUSY_MS
) -> sqlite3.Connection:
    """Open a store; for writing it is created or migrated.

    Raises:
        NotFound: the file does not exist (readonly).
        StoreError: newer version, not a store, locked, full disk, corrupt.
    """
    if sqlite3.sqlite_version_info < (3, 37):
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} is too old for a store.",
            hint="Use a Python built with SQLite ≥ 3.37.",
        )
    if readonly:
        return _reader(Path(path), busy_ms)
    return _writer(path, busy_ms)


def _writer(path: Path | str, busy_ms: int) -> sqlite3.Connection:
    with map_errors(path):
        if str(path) != ":memory:":
            with writing(f"the folder of the store {path}", ELSEWHERE):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
        conn = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            _look(conn, path, busy_ms)
            version = _check(conn, path)
            conn.execute("PRAGMA synchronous=NORMAL")
            conn.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
            conn.execute("PRAGMA journal_size_limit=134217728")
            conn.execute(
                "PRAGMA cache_size=-16384"
            )  # KiB: the pages that a training writes to again and again
            _use_wal(conn, busy_ms)
            if version == 0:
                migrate(conn)
            elif version < SCHEMA_VERSION:
                bring_up(conn, path)
            conn.execute("PRAGMA foreign_keys=ON")
        except BaseException:
            conn.close()
            raise
        return conn


def _use_wal(conn: sqlite3.Connection, busy_ms: int) -> None:
    """Switch a new file to WAL. SQLite does not wait for the lock here, so two processes creating a store need this."""
    end = time.monotonic() + busy_ms / 1000
    while conn.execute("PRAGMA journal_mode").fetchone()[0] not in ("wal", "memory"):
        try:
            conn.execute("PRAGMA journal_mode=WAL")
            return  # a file system that cannot do it keeps its mode
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _reader(path: Path, busy_ms: int) -> sqlite3.Connection:
    if not path.exists():
        raise NotFound(
            f"No store at {path}.",
            hint="`agentrl rollout` or `agentrl train` makes one; --db names another.",
        )
    alone = lacks_log(path)  # before SQLite makes an empty one
    with map_errors(path):
        try:
            conn = _open_ro(path, busy_ms, "mode=ro")
        except sqlite3.OperationalError:
            # In a read-only folder, or on a full disk, a WAL file opens only as immutable: no one can write it there.
            writable = os.access(path.parent, os.W_OK) and not (alone and lacks_room(path))
            if writable or not os.access(path, os.R_OK):
                raise
            conn = _open_ro(path, busy_ms, "mode=ro&immutable=1")
        try:
            version = _check(conn, path)
            alone = alone and conn.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
            if version == 0 and alone:
                raise StoreError(
                    f"The store {path} holds nothing by itself: its log {path}-wal is missing.",
                    hint=f"While a store is in use, its newest rows are there. {COPY_BOTH.format(path=path)}",
                )
            if version == 0:
                raise StoreError(f"The store {path} is empty.", hint="Run `agentrl rollout` first.")
            if version < SCHEMA_VERSION:
                add_views(conn, version)
            sql = "SELECT name, heartbeat, pid, pid_started, boot, host FROM runs WHERE claim<>''"
            for name, heartbeat, *holder in conn.execute(sql).fetchall() if alone else ():
                if Holder(*holder).lives(heartbeat):
                    _LOG.warning(
                        "%s is running, and the log %s-wal is missing: this file is a copy without its newest rows. %s",
                        *(name, path, COPY_BOTH.format(path=path)),
                    )
                    break
        except BaseException:
            conn.close()
            raise
        return conn


def _open_ro(path: Path, busy_ms: int, options: str) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path.absolute()))}?{options}"
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0)
    try:
        conn.execute("PRAGMA query_only=ON")
        conn.execute("PRAGMA foreign_keys=ON")
        _look(conn, path, busy_ms)
        conn.execute("PRAGMA cache_size=-65536")  # reads the file, so it may have to wait
    except BaseException:
        conn.close()
        raise
    return conn


def _look(conn: sqlite3.Connection, path: Path | str, busy_ms: int) -> None:
    """Read the file once. From then on the connection waits for locks, but not for those that can never be had."""
    try:
        conn.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or lacks_locks(path):
            raise
    conn.execute(f"PRAGMA busy_timeout={busy_ms}")


def _check(conn: sqlite3.Connection, path: Path | str) -> int:
    """Return the file's schema version; 0 for a fresh file. Refuses newer and foreign files."""
    application = int(conn.execute("PRAGMA application_id").fetchone()[0])
    version = int(conn.execute("PRAGMA user_version").fetchone()[0])
    if application != APPLICATION_ID:
        tables = int(conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        if application or version or tables:
            raise StoreError(
                f"{path} is a SQLite file, but not an agentrl store.",
                hint="Name another with --db.",
            )
        return 0
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"The store {path} was written by a newer agentrl (schema {version}; this one knows {SCHEMA_VERSION}).",
            hint="Upgrade: pip install -U agentrl-cli. Nothing was changed.",
        )
    return version
