"""An open store file: one connection, short transactions, and a buffer for writes that can wait.

A write transaction is opened, filled and committed at once and never left open, so several processes share a file.
Writes that can wait (running episodes, logs, events, training signals) stay in memory and are made together, by the
next write that cannot wait or by a thread, after at most `LINGER` seconds: `kill -9` loses no more.

`Identity` checks that a connection's open files are those at its path, as SQLite does not. If a store is deleted or
replaced under a writer, every further commit goes into a file without a name, and is lost when the process ends. The
log beside it (`-wal`) holds commits that are not in the file yet, and without its index (`-shm`) other processes do
not see this one's locks, so both count as much as the file.

The core's schema has no table of a plugin: a store gets one when its plugin first writes to it. The plugin offers the
statements under `tables`. They say IF NOT EXISTS: a store of an earlier version has the table already, and two
processes may add it at the same time.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from agentrl_cli.errors import StoreError
from agentrl_cli.registry import resolve
from agentrl_cli.store.buffer import LINGER, LiveEpisode, Params, WriteBuffer, savepoint
from agentrl_cli.store.connection import BUSY_MS, connect
from agentrl_cli.store.migration import drop_views
from agentrl_cli.store.schema import statements
from agentrl_cli.store.sqlite_errors import RECOVER, map_errors


class Identity:
    """The files of one open store, by device and inode."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()  # the process may change its folder
        self._known: dict[str, tuple[int, int]] = {}
        self.require()

    def require(self, conn: sqlite3.Connection | None = None) -> None:
        """Raise StoreError if a file was deleted or replaced; log files are recorded when they appear.

        If only the log is missing, `conn` still has it open and writes it back into the file first.
        """
        for suffix in ("", "-wal", "-shm"):
            try:
                found = os.stat(f"{self.path}{suffix}")
                now = found.st_dev, found.st_ino
            except OSError:
                now = None
            if self._known.get(suffix, now) != now:
                if now is None and suffix == "-wal" and conn and not conn.in_transaction:
                    with suppress(sqlite3.Error):  # else a reader misses the last commits
                        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                raise StoreError(
                    f"The store was {'deleted' if now is None else 'replaced'} while it was in use:"
                    f" {self.path}{suffix}. What was being written is lost.",
                    hint="Put it back, from a backup if need be, then `agentrl train --resume last` continues.",
                )
            if now is not None:
                self._known[suffix] = now


class StoreFile:
    """An open store file. Use it from one thread; other threads and processes open their own."""

    def __init__(self, path: Path | str, *, readonly: bool = False, busy_ms: int = BUSY_MS) -> None:
        self.path = path if str(path) == ":memory:" else Path(path)
        self.home = Path(path).absolute().parent if isinstance(self.path, Path) else None
        """The folder that paths in the store are relative to; None for a store in memory."""
        self.readonly = readonly
        self.conn = connect(path, readonly=readonly, busy_ms=busy_ms)
        self.lock = threading.RLock()
        self.buffer = WriteBuffer(self.path)
        self._identity = None if readonly or str(path) == ":memory:" else Identity(path)
        self.in_transaction = False
        """Whether a `transaction` is open here."""
        self._timer: threading.Timer | None = None  # of the next flush
        self._closed = False
        self._pid = os.getpid()
        if not readonly:
            atexit.register(self._close_at_exit)

    @classmethod
    def open(cls, path: Path | str, readonly: bool = False, *, busy_ms: int = BUSY_MS) -> Self:
        """Open a store; for writing it is created if absent.

        Raises:
            NotFound: the file does not exist (readonly).
            StoreError: written by a newer agentrl, not a store, locked, damaged, on a full disk.
        """
        return cls(path, readonly=readonly, busy_ms=busy_ms)

    def close(self) -> None:
        """Write the buffer and close; closing twice is fine."""
        if self._closed:
            return
        try:
            if not self.readonly:
                self.flush()
                if self._identity is not None:
                    self._identity.require(self.conn)
                if self.buffer.refused is not None:
                    raise self.buffer.refused
        finally:
            self._closed = True
            atexit.unregister(self._close_at_exit)
            with self.lock:
                if self._timer is not None:
                    self._timer.cancel()
                self.conn.close()

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:  # never from a forked child: the connection is the parent's
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, tb: object) -> None:
        try:
            self.close()
        except StoreError:
            if value is None:  # else it is the better message, and most often the same
                raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything inside is written together or not at all. Nests; do not await inside.

        Raises StoreError; earlier waiting writes then wait again.
        """
        with self.lock, map_errors(self.path):
            if self.in_transaction:
                with savepoint(self.conn):
                    yield self.conn
                return
            self.require_writable()
            if self._identity is not None:
                self._identity.require(self.conn)
            self.in_transaction = True
            try:
                with self.buffer.transaction(self.conn):
                    yield self.conn
            finally:
                self.in_transaction = False

    def write(self, sql: str, params: Params) -> int:
        """Commit one statement. Returns how many rows changed. Raises StoreError."""
        with self.transaction() as conn:
            return conn.execute(sql, params).rowcount

    def write_later(self, sql: str, params: Params) -> None:
        """Queue one write; inside a transaction it happens at once, in order."""
        with self.lock:
            self.require_writable()
            if self.in_transaction:
                self.conn.execute(sql, params)
                return
            self.buffer.queue.append((sql, params))
            self.wake()

    def wake(self) -> None:
        """Schedule writing the buffer within `LINGER` seconds. Raises StoreError if an earlier write failed."""
        self.buffer.raise_failure()
        if self._timer is None:
            self._timer = threading.Timer(LINGER, self._flush_in_background)
            self._timer.daemon = True
            self._timer.start()

    def _flush_in_background(self) -> None:
        with self.lock:
            self._timer = None
            try:
                if not self._closed:
                    self.flush()
            except StoreError as error:  # raised by the next write, in the caller's thread
                self.postpone(error)

    def postpone(self, error: StoreError) -> None:
        """Let the next write raise an error that nothing could catch."""
        with self.lock:
            self.buffer.failure = error

    def require_writable(self) -> None:
        """Raise StoreError if the store was opened for reading only."""
        if self.readonly:
            raise StoreError(f"The store {self.path} was opened for reading only.")

    def running(self, episode_id: str) -> LiveEpisode | None:
        """Return an episode in the buffer; None inside a transaction, which writes at once."""
        self.require_writable()
        return None if self.in_transaction else self.buffer.episodes.get(episode_id)

    def flush(self) -> None:
        """Write the buffer now. Raises StoreError."""
        with self.lock:
            if self.buffer.is_waiting and not self.in_transaction:
                with self.transaction():
                    pass

    def flush_ended(self) -> None:
        """Write the episodes that have ended, each whole; those that run may wait. Raises StoreError."""
        with self.lock:
            episodes = self.buffer.episodes
            ended = {name: one for name, one in episodes.items() if one.ended}
            if not ended or self.in_transaction or self._closed:
                return
            self.buffer.episodes = ended
            try:
                self.flush()
            finally:
                self.buffer.episodes |= {
                    name: one for name, one in episodes.items() if not one.ended
                }

    def select(
        self, sql: str, params: Params = (), *, settled: bool = True
    ) -> list[tuple[Any, ...]]:
        """Return all rows of a query. Waiting writes come first, unless `settled` is False: it cannot matter."""
        with self.lock, map_errors(self.path):
            if settled:
                self.flush()
            return self.conn.execute(sql, params).fetchall()

    def select_one(self, sql: str, params: Params = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query, None if absent."""
        return next(iter(self.select(sql, params)), None)

    def select_dicts(self, sql: str, params: Params = ()) -> list[dict[str, Any]]:
        """Return all rows of a query by column name."""
        with self.lock, map_errors(self.path):
            self.flush()
            cursor = self.conn.execute(sql, params)
            names = [item[0] for item in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def require_sound(self, *, at_most: int | None = None) -> None:
        """Raise StoreError if SQLite's quick check finds damage; a file of more than `at_most` bytes is not read."""
        with self.lock, map_errors(self.path):
            if at_most is not None and Path(self.path).stat().st_size > at_most:
                return
            found = str(self.conn.execute("PRAGMA quick_check(1)").fetchone()[0])
        if found != "ok":
            raise StoreError(
                f"The store {self.path} is damaged: {' '.join(found.split())}.", hint=RECOVER
            )

    def data_version(self) -> int:
        """Return a number that changes when another connection has written: poll it before reading again."""
        with self.lock, map_errors(self.path):
            if self.readonly:
                drop_views(self.conn)
            return int(self.conn.execute("PRAGMA data_version").fetchone()[0])


class Part:
    """One part of a store. All parts share its file."""

    def __init__(self, file: StoreFile) -> None:
        self.file = file


def batches(values: Iterable[Any], size: int = 500) -> Iterator[list[Any]]:
    """Yield lists of at most `size`: SQLite limits the parameters of a statement."""
    values = list(values)
    for start in range(0, len(values), size):
        yield values[start : start + size]


class PluginPart(Part):
    """A part of a store whose table a plugin brings."""

    table = ""
    """Its name, under which the plugin offers the statements that make it."""

    def __init__(self, file: StoreFile) -> None:
        """Add the table to a store that lacks it, unless it is open for reading only."""
        super().__init__(file)
        if not file.readonly and not self.exists:
            script: str = resolve("tables", {}, self.table)
            with file.transaction() as conn:
                for statement in statements(script):
                    conn.execute(statement)

    @property
    def exists(self) -> bool:
        """Whether the store has the table; a reader of one without it finds no rows."""
        found = "SELECT 1 FROM sqlite_schema WHERE type='table' AND name=?"
        return bool(self.file.select(found, (self.table,), settled=False))
