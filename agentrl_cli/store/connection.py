"""Opening a SQLite file as a store, migrating it, and mapping SQLite's errors.

Writers get WAL, `synchronous=NORMAL`, a busy timeout and foreign keys, and migrate an older file. Readers open
`mode=ro` and create nothing. A file from a newer agentrl is refused before anything in it changes.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from agentrl_cli.errors import NotFound, StoreError, disk_problem
from agentrl_cli.store.holder import Holder
from agentrl_cli.store.schema import APPLICATION_ID, MIGRATION_SET, MIGRATIONS, SCHEMA_VERSION, Migration, statements

BUSY_MS = 30_000
ELSEWHERE = "Choose another place with --db, or make this one writable."
RECOVER = "`sqlite3 FILE .recover | sqlite3 NEW.db` saves what can be read; then use --db NEW.db."
WAL_PAGES = 4_000
"""Pages of write-ahead log (16 MB) between two checkpoints: each costs a sync to disk."""


def _python(value: Any) -> Any:
    return value.item()


for _kind in (np.int8, np.int32, np.int64, np.bool_, np.float32):
    sqlite3.register_adapter(_kind, _python)  # rows may hold numpy numbers


def connect(path: Path | str, *, readonly: bool = False, busy_ms: int = BUSY_MS) -> sqlite3.Connection:
    """Open a store; for writing it is created or migrated.

    Raises:
        NotFound: the file does not exist (readonly).
        StoreError: newer version, not a store, locked, full disk, corrupt.
    """
    if sqlite3.sqlite_version_info < (3, 37):
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} is too old for a store.", hint="Use a Python built with SQLite ≥ 3.37."
        )
    if readonly:
        return _reader(Path(path), busy_ms)
    return _writer(path, busy_ms)


def _writer(path: Path | str, busy_ms: int) -> sqlite3.Connection:
    with mapped(path):
        if str(path) != ":memory:":
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_problem(error, f"the store {path}", ELSEWHERE) or StoreError(
                    f"Cannot make the folder of the store {path}: {error.strerror}.", hint=ELSEWHERE
                ) from error
        conn = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=busy_ms / 1000)
        try:
            version = _check(conn, path)
            conn.execute("PRAGMA synchronous=NORMAL")
            conn.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
            conn.execute("PRAGMA journal_size_limit=134217728")
            conn.execute("PRAGMA cache_size=-16384")  # KiB: the pages that a training writes to again and again
            _use_wal(conn, busy_ms)
            if version < SCHEMA_VERSION:
                _require_free(conn, path)
                migrate(conn)
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
            f"No store at {path}.", hint="`agentrl rollout` or `agentrl train` makes one; --db names another."
        )
    with mapped(path):
        try:
            conn = _open_ro(path, busy_ms, "mode=ro")
        except sqlite3.OperationalError:
            # In a read-only folder a WAL file opens only as immutable: no one else can write it there.
            if os.access(path.parent, os.W_OK) or not os.access(path, os.R_OK):
                raise
            conn = _open_ro(path, busy_ms, "mode=ro&immutable=1")
        try:
            version = _check(conn, path)
            if 0 < version < SCHEMA_VERSION:
                conn.close()
                _writer(path, busy_ms).close()
                conn = _open_ro(path, busy_ms, "mode=ro")
            elif version == 0:
                raise StoreError(f"The store {path} is empty.", hint="Run `agentrl rollout` first.")
        except BaseException:
            conn.close()
            raise
        return conn


def _open_ro(path: Path, busy_ms: int, options: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?{options}"
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=busy_ms / 1000)
    try:
        conn.execute("PRAGMA query_only=ON")
        conn.execute("PRAGMA foreign_keys=ON")
        conn.execute("PRAGMA cache_size=-65536")
        conn.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        conn.close()
        raise
    return conn


def _check(conn: sqlite3.Connection, path: Path | str) -> int:
    """The file's schema version; 0 for a fresh file. Refuses newer and foreign files."""
    application = int(conn.execute("PRAGMA application_id").fetchone()[0])
    version = int(conn.execute("PRAGMA user_version").fetchone()[0])
    if application != APPLICATION_ID:
        tables = int(conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
        if application or version or tables:
            raise StoreError(f"{path} is a SQLite file, but not an agentrl store.", hint="Name another with --db.")
        return 0
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"The store {path} was written by a newer agentrl (schema {version}; this one knows {SCHEMA_VERSION}).",
            hint="Upgrade: pip install -U agentrl-cli. Nothing was changed.",
        )
    return version


def _require_free(conn: sqlite3.Connection, path: Path | str) -> None:
    """Raise StoreError if a process of an older agentrl works on a run: it could not write a migrated store."""
    names = ("name", "claim", "heartbeat", "pid", "pid_started", "boot", "host")
    if not {str(row[1]) for row in conn.execute("PRAGMA table_info(runs)")}.issuperset(names):
        return
    for name, claim, heartbeat, *holder in conn.execute(f"SELECT {','.join(names)} FROM runs WHERE claim<>''"):
        if Holder(*holder).lives(heartbeat):
            raise StoreError(
                f"An older agentrl works on the run {name} in {path} ({claim}), and this one would migrate the store.",
                hint="Wait until that ends, or look with the agentrl that began it.",
            )


def migrate(conn: sqlite3.Connection, upto: tuple[Migration, ...] = MIGRATIONS) -> None:
    """Apply pending migrations in one transaction: readers see the old schema or the new one, never a mix.

    Turns foreign keys off, for good: a table that is rebuilt would take the rows that refer to it with it.
    """
    from sqlite_utils import Database, Migrations  # here: importing it costs 0.15 s, and most processes never need it

    migrations = Migrations(MIGRATION_SET)
    for name, change in upto:

        def apply(db: Database, change: str | Callable[[sqlite3.Connection], None] = change) -> None:
            if callable(change):
                change(db.conn)
                return
            for statement in statements(change):
                db.execute(statement)

        migrations(name=name)(apply)
    conn.execute("PRAGMA foreign_keys=OFF")
    conn.execute("BEGIN IMMEDIATE")
    try:
        migrations.apply(Database(conn))
        conn.execute(f"PRAGMA application_id={APPLICATION_ID}")
        conn.execute(f"PRAGMA user_version={len(upto)}")
        conn.execute("COMMIT")
    except BaseException as error:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        if isinstance(error, sqlite3.DatabaseError) and _explain(error, "") is None:
            raise StoreError(
                f"The store cannot be brought to this version: {error}.",
                hint="Nothing was changed. Remove what another program added to the file, or name another with --db.",
            ) from error
        raise


@contextmanager
def mapped(path: Path | str) -> Iterator[None]:
    """Turn SQLite's errors about the file into a StoreError with a hint; errors in our SQL pass unchanged."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        found = _explain(error, path)
        if found is None:
            raise
        raise found from error


def _explain(error: sqlite3.DatabaseError, path: Path | str) -> StoreError | None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    text = str(error)
    if code == sqlite3.SQLITE_FULL or "disk is full" in text:
        return StoreError(
            f"The disk is full: the store {path} could not be written.",
            hint="Free some space (`agentrl db prune` drops old token arrays); what was written before is safe.",
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(
            f"The store {path} is locked by another process.",
            hint="Wait for it, or find it with `fuser` on that file; a backup tool may be holding it.",
        )
    if code == sqlite3.SQLITE_NOTADB:
        return StoreError(f"{path} is not an agentrl store: it is not a SQLite file.", hint="Name another with --db.")
    if code == sqlite3.SQLITE_CORRUPT:
        return StoreError(
            f"The store {path} is damaged: {text}.",
            hint=RECOVER,
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) and (why := _forbidden(Path(path))):
        return StoreError(f"{why}: the store {path} could not be written.", hint=ELSEWHERE)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        return StoreError(
            f"The store {path} cannot be opened or written: {text}.",
            hint="Check that the file and its folder can be written and lie on a local disk (WAL needs one).",
        )
    if code == sqlite3.SQLITE_CONSTRAINT and "FOREIGN KEY" in text:
        return StoreError(
            "The row refers to a run, an episode or a tokenizer that is not in the store.",
            hint="Call store.runs.add() first.",
        )
    return None


def _forbidden(path: Path) -> str:
    """Why the file cannot be written; empty if it can."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return ""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "The disk is read-only"
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        return "Permission denied"
    return ""
