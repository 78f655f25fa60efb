"""SQLite's errors about a store's file as sentences with a hint."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from agentrl_cli.errors import StoreError
from agentrl_cli.store.codec import loads
from agentrl_cli.store.holder import Holder
from agentrl_cli.store.schema import SCHEMA_VERSION

ELSEWHERE = "Choose another place with --db, or make this one writable."
RECOVER = "`sqlite3 FILE .recover | sqlite3 NEW.db` saves what can be read; then use --db NEW.db."
COPY_BOTH = "Copy {path}-wal with it, or make the copy with `agentrl db backup COPY.db`."
MIGRATION = "migration"
"""Kind of the event that names the process that migrates a store; no other process can write meanwhile."""


@contextmanager
def map_errors(path: Path | str) -> Iterator[None]:
    """Turn SQLite's errors about the file into a StoreError with a hint; errors in our SQL pass unchanged."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        found = explain(error, path)
        if found is None:
            raise
        raise found from error


def explain(error: sqlite3.DatabaseError, path: Path | str) -> StoreError | None:
    """Return the StoreError for an error about the file; None for any other."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    text = str(error)
    no_index = code == sqlite3.SQLITE_IOERR and lacks_room(path)
    if code == sqlite3.SQLITE_FULL or "disk is full" in text or no_index:
        return StoreError(
            f"The disk is full: the store {path} could not be written.",
            hint="Free some space (`agentrl db prune` drops old token arrays); what was written before is safe.",
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return _explain_lock(Path(path))
    if code == sqlite3.SQLITE_NOTADB:
        return StoreError(
            f"{path} is not an agentrl store: it is not a SQLite file.",
            hint="Name another with --db.",
        )
    if code == sqlite3.SQLITE_CORRUPT:
        copied = f" If it is a copy: {COPY_BOTH.format(path=path)}" * lacks_log(path)
        return StoreError(f"The store {path} is damaged: {text}.", hint=RECOVER + copied)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) and (
        why := _forbidden(Path(path))
    ):
        return StoreError(f"{why}: the store {path} could not be written.", hint=ELSEWHERE)
    if code in (
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_IOERR,
    ):
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


def lacks_log(path: Path | str) -> bool:
    """Whether no log (`-wal`) with commits lies beside a file; not every file needs one.

    The file itself is not opened here: closing it would give up this process's locks on it.
    """
    try:
        return not os.path.getsize(f"{path}-wal")
    except OSError:
        return True


def lacks_room(path: Path | str) -> bool:
    """Whether the disk is so full that SQLite cannot make the index of a log, which it reports as an I/O error."""
    folder = Path(path).absolute().parent
    return folder.is_dir() and not os.statvfs(folder).f_bavail


def lacks_locks(path: Path | str) -> bool:
    """Whether the file system refuses locks. SQLite reports that like a lock that another process holds.

    Tried on another file, for the same reason.
    """
    try:
        with tempfile.TemporaryFile(dir=Path(path).absolute().parent) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return False


def _explain_lock(path: Path) -> StoreError:
    if lacks_locks(path):
        return StoreError(
            f"The file system of the store {path} has no file locks.",
            hint="Keep it on a local disk and name it with --db; a network file system has to be mounted with locks.",
        )
    if who := _migrating(path):
        return StoreError(
            f"The store {path} is locked: {who} brings it to the schema of its agentrl.",
            hint="Wait for it and try again; reading commands work meanwhile.",
        )
    return StoreError(
        f"The store {path} is locked by another process.",
        hint="Wait for it, or find it with `fuser` on that file; a backup tool may be holding it.",
    )


def _migrating(path: Path) -> str:
    """Return the process that migrates a store and since when; empty if none does."""
    newest = "SELECT at, data FROM events WHERE run_id IS NULL AND kind=? ORDER BY id DESC LIMIT 1"
    try:
        uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=0)) as conn:
            (version,) = conn.execute("PRAGMA user_version").fetchone()
            found = (
                conn.execute(newest, (MIGRATION,)).fetchall() if version < SCHEMA_VERSION else ()
            )
    except sqlite3.Error:
        return ""
    for at, text in found:
        who = {name: value for name, value in loads(text).items() if name not in ("from", "to")}
        if Holder(**who).lives(at):
            since = time.strftime("%H:%M:%S", time.localtime(at))
            return f"process {who['pid']} on {who['host']}, since {since},"
    return ""


def _forbidden(path: Path) -> str:
    """Return why the file cannot be written; empty if it can."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return ""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "The disk is read-only"
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        return "Permission denied"
    return ""
