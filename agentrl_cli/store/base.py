"""The part of a store that readers and writers share: one connection, short transactions, a queue for what can wait.

A write transaction is opened, filled and committed in one go and never left open, so several processes share a file.
What can wait (running episodes, see running.py; logs, events, training signals) is kept in memory and written together,
by the next write that cannot wait or by a small thread, after at most `LINGER` seconds: `kill -9` loses no more.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentrl_cli.errors import StoreError
from agentrl_cli.store.connection import BUSY_MS, RECOVER, connect, mapped
from agentrl_cli.store.identity import Identity
from agentrl_cli.store.live_buffer import Running

if TYPE_CHECKING:
    from sqlite_utils import Database

LINGER = 0.8
"""Seconds that a write may wait."""

MAX_QUEUE = 50_000
"""Queued writes kept while the file cannot be written; beyond it the oldest go."""

Params = Sequence[Any]
Statement = tuple[str, Params]


class StoreBase:
    """A store file, open. Use it from one thread; other threads and processes open their own."""

    def __init__(self, path: Path | str, *, readonly: bool = False, busy_ms: int = BUSY_MS) -> None:
        self.path = path if str(path) == ":memory:" else Path(path)
        self.home = Path(path).absolute().parent if isinstance(self.path, Path) else None
        """The folder that paths in the store are relative to; None of a store in memory."""
        self.readonly = readonly
        self._conn = connect(path, readonly=readonly, busy_ms=busy_ms)
        self._identity = None if readonly or str(path) == ":memory:" else Identity(path)
        self._lock = threading.RLock()
        self._depth = 0
        self._queue: list[Statement] = []
        self._running: dict[str, Running] = {}
        self._live: dict[str, Params] = {}
        """Newest states of episodes that are not among the running ones."""
        self._groups: set[tuple[str | None, str]] = set()
        """(run, group) of groups that were added here."""
        self._failure: StoreError | None = None
        """What went wrong in the background: raised by the next write."""
        self._refused: StoreError | None = None
        """The last row that was refused, until it is raised."""
        self._pending = threading.Event()
        self._closing = threading.Event()
        self._flusher: threading.Thread | None = None
        self._pid = os.getpid()
        if not readonly:
            atexit.register(self._close_at_exit)

    @classmethod
    def open(cls, path: Path | str, readonly: bool = False, *, busy_ms: int = BUSY_MS) -> Self:
        """Open a store; for writing it is made where there is none.

        Raises:
            NotFound: there is no such file (readonly).
            StoreError: written by a newer agentrl, not a store, locked, damaged, on a full disk.
        """
        return cls(path, readonly=readonly, busy_ms=busy_ms)

    def close(self) -> None:
        """Write what is queued and close; closing twice is fine."""
        if self._closing.is_set():
            return
        try:
            if not self.readonly:
                self.flush()
                self._require_same_files()
                if self._refused is not None:
                    raise self._refused
        finally:
            self._closing.set()
            self._pending.set()
            atexit.unregister(self._close_at_exit)
            with self._lock:
                self._conn.close()

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:  # never from a forked child: the connection is the parent's
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is None:
            self.close()
            return
        with suppress(StoreError):  # what is on its way says more, and most often the same
            self.close()

    @property
    def db(self) -> Database:
        """The same connection as a sqlite-utils Database."""
        from sqlite_utils import Database

        return Database(self._conn)

    # Writing

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything inside is written together or not at all. Nests; do not await inside.

        Raises StoreError; what was queued before stays queued then.
        """
        with self._lock, mapped(self.path):
            if self._depth:
                with self._savepoint():
                    yield self._conn
                return
            self._refuse_readonly()
            self._require_same_files()
            kept = self._queue, dict(self._running), self._live
            self._conn.execute("BEGIN IMMEDIATE")
            self._depth, self._queue, self._live = 1, [], {}
            try:
                written = self._drain(*kept)
                yield self._conn
                self._drain((), {}, self._live)
                self._conn.execute("COMMIT")
            except BaseException:
                if self._conn.in_transaction:
                    self._conn.execute("ROLLBACK")
                self._queue, self._running, self._live = kept
                del self._queue[:-MAX_QUEUE]
                raise
            else:
                self._live = {}
                self._committed(written)
            finally:
                self._depth = 0

    def _require_same_files(self) -> None:
        """Raise StoreError if the file at the path is no longer the open one: nothing would be kept."""
        if self._identity is None:
            return
        try:
            self._identity.require()
        except StoreError:
            if self._identity.has_lost_its_log and not self._conn.in_transaction:
                with suppress(sqlite3.Error):  # else the next reader finds a file without its last commits
                    self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            raise

    def _committed(self, written: Sequence[Running]) -> None:
        for one in written:
            one.written()
            if one.ended:
                self._running.pop(one.episode.id, None)

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        """A transaction inside a transaction: taken back by itself where it fails and the outer one goes on."""
        self._conn.execute("SAVEPOINT inner_write")
        try:
            yield
        except BaseException:
            if self._conn.in_transaction:  # a full disk has ended all of it already
                self._conn.execute("ROLLBACK TO inner_write")
                self._conn.execute("RELEASE inner_write")
            raise
        self._conn.execute("RELEASE inner_write")

    def _drain(
        self,
        queue: Sequence[Statement],
        running: Mapping[str, Running],
        live: Mapping[str, Params],
    ) -> list[Running]:
        """Writes all of that; returns the running episodes it wrote. A bad row does not hold back the others."""
        for sql, params in queue:
            self._try(self._conn.execute, sql, params)
        written = [one for one in running.values() if one.waits]
        for one in written:
            self._try(self._write_whole, one)
        if live:
            self._conn.executemany(
                "UPDATE live SET state=?, turn=?, text=?, updated=? WHERE episode_id=?", live.values()
            )
        return written

    def _write_whole(self, one: Running) -> None:
        """All of an episode that waits, or nothing of it."""
        with self._savepoint():
            one.write(self._conn)

    def _try(self, write: Callable[..., Any], *arguments: Any) -> None:
        try:
            write(*arguments)
        except (sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError, OverflowError) as error:
            self._refused = self._failure = StoreError(f"A row was refused by {self.path}: {error}.")

    def _later(self, sql: str, params: Params) -> None:
        """Queue one write; inside a transaction it happens at once, in order."""
        with self._lock:
            self._refuse_readonly()
            if self._depth:
                self._conn.execute(sql, params)
                return
            self._queue.append((sql, params))
            self._wake()

    def _wake(self) -> None:
        if self._failure is not None:
            self._raise_failure()
        if self._pending.is_set():
            return
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_late, name="agentrl-store", daemon=True)
            self._flusher.start()
        self._pending.set()

    def _flush_late(self) -> None:
        """The flusher thread: what was queued is written `LINGER` seconds later, if it still is."""
        while not self._closing.is_set():
            self._pending.wait()
            if self._closing.wait(LINGER):
                return
            self._pending.clear()
            try:
                self.flush()
            except StoreError as error:  # raised in the thread of whoever uses the store
                self.postpone(error)
            except sqlite3.ProgrammingError:  # closed meanwhile
                return

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure, self._refused = self._failure, None, None
            raise failure

    def postpone(self, error: StoreError) -> None:
        """Let the next write raise an error that came up where nothing could catch it."""
        with self._lock:
            self._failure = error

    def _refuse_readonly(self) -> None:
        if self.readonly:
            raise StoreError(f"The store {self.path} was opened for reading only.")

    @property
    def _waits(self) -> bool:
        """Whether anything is to be written outside a transaction."""
        if self._queue or self._live:
            return True
        return bool(self._running) and any(one.waits for one in self._running.values())

    def flush(self) -> None:
        """Write what is queued now. Raises StoreError."""
        with self._lock:
            if self._waits and not self._depth:
                with self.transaction():
                    pass

    def flush_ended(self) -> None:
        """Write the episodes that have ended, each with all that is known of it; those that run may wait.

        Raises StoreError.
        """
        with self._lock:
            ended = {name: one for name, one in self._running.items() if one.ended}
            if not ended or self._depth or self._closing.is_set():
                return
            others = {name: one for name, one in self._running.items() if not one.ended}
            self._running = ended
            try:
                self.flush()
            finally:
                self._running |= others

    # Reading

    def _rows(self, sql: str, params: Params = (), *, settled: bool = True) -> list[tuple[Any, ...]]:
        """All rows of a query, what this store has queued included; not `settled`: it cannot be about that."""
        with self._lock, mapped(self.path):
            if settled and (self._waits or self._live):
                self._settle()
            return self._conn.execute(sql, params).fetchall()

    def _settle(self) -> None:
        if self._depth:
            live, self._live = self._live, {}
            self._drain((), {}, live)
        else:
            self.flush()

    def _row(self, sql: str, params: Params = ()) -> tuple[Any, ...] | None:
        rows = self._rows(sql, params)
        return rows[0] if rows else None

    def _dicts(self, sql: str, params: Params = ()) -> list[dict[str, Any]]:
        with self._lock, mapped(self.path):
            if self._waits or self._live:
                self._settle()
            cursor = self._conn.execute(sql, params)
            names = [item[0] for item in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def require_sound(self, *, at_most: int | None = None) -> None:
        """Raise StoreError if SQLite's quick check finds damage; a file of more than `at_most` bytes is not read."""
        with self._lock, mapped(self.path):
            if at_most is not None and Path(self.path).stat().st_size > at_most:
                return
            found = str(self._conn.execute("PRAGMA quick_check(1)").fetchone()[0])
        if found != "ok":
            raise StoreError(f"The store {self.path} is damaged: {' '.join(found.split())}.", hint=RECOVER)

    def data_version(self) -> int:
        """A number that changes when another connection has written: poll it before reading again."""
        with self._lock, mapped(self.path):
            return int(self._conn.execute("PRAGMA data_version").fetchone()[0])


def batches(values: Iterable[Any], size: int = 500) -> Iterator[list[Any]]:
    """Lists of at most `size`: SQLite limits the parameters of a statement."""
    values = list(values)
    for start in range(0, len(values), size):
        yield values[start : start + size]
