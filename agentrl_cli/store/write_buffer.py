"""Writes that wait in memory, and the thread that writes them later."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl_cli.errors import StoreError
from agentrl_cli.store.live_episode import LiveEpisode

LINGER = 0.8
"""Seconds that a write may wait."""

MAX_QUEUE = 50_000
"""Statements kept while the file cannot be written; beyond it the oldest are dropped."""

Params = Sequence[Any]
Statement = tuple[str, Params]


class WriteBuffer:
    """Writes that a store has accepted and not made. The store's lock guards it."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self.queue: list[Statement] = []
        self.episodes: dict[str, LiveEpisode] = {}
        """Episodes that were started by this store, by id."""
        self.failure: StoreError | None = None
        """An error from the background, which the next write raises."""
        self.refused: StoreError | None = None
        """The last row that SQLite refused, until it is raised."""

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits to be written."""
        return bool(self.queue) or any(one.is_waiting for one in self.episodes.values())

    @contextmanager
    def transaction(self, conn: sqlite3.Connection) -> Iterator[None]:
        """Yield a transaction that makes the waiting writes first. If it fails, all wait again.

        A bad row does not hold back the others.
        """
        from agentrl_cli.hooks.waits import waiting  # late: who only reads needs no asyncio

        kept = self.queue, dict(self.episodes)
        with waiting(f"the lock of {self.path}, which another process holds", moves=False):
            conn.execute("BEGIN IMMEDIATE")
        self.queue = []
        try:
            for sql, params in kept[0]:
                self._try(conn.execute, sql, params)
            written = [one for one in kept[1].values() if one.is_waiting]
            for one in written:
                self._try(_write_whole, conn, one)
            yield
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            self.queue, self.episodes = kept
            del self.queue[:-MAX_QUEUE]
            raise
        for one in written:
            one.mark_written()
            if one.ended:
                self.episodes.pop(one.episode.id, None)

    def raise_failure(self) -> None:
        """Raise the error from the background, once."""
        if self.failure is not None:
            failure, self.failure, self.refused = self.failure, None, None
            raise failure

    def _try(self, write: Callable[..., Any], *arguments: Any) -> None:
        try:
            write(*arguments)
        except (
            sqlite3.IntegrityError,
            sqlite3.InterfaceError,
            sqlite3.ProgrammingError,
            OverflowError,
        ) as error:
            self.refused = self.failure = StoreError(f"A row was refused by {self.path}: {error}.")


def _write_whole(conn: sqlite3.Connection, episode: LiveEpisode) -> None:
    """Write everything that waits of an episode, or nothing."""
    with savepoint(conn):
        episode.write(conn)


@contextmanager
def savepoint(conn: sqlite3.Connection) -> Iterator[None]:
    """Yield a nested transaction: rolled back by itself if it fails and the outer one continues."""
    conn.execute("SAVEPOINT inner_write")
    try:
        yield
    except BaseException:
        if conn.in_transaction:  # a full disk has ended the whole transaction already
            conn.execute("ROLLBACK TO inner_write")
            conn.execute("RELEASE inner_write")
        raise
    conn.execute("RELEASE inner_write")


class Flusher:
    """A daemon thread that calls `flush` once, `LINGER` seconds after a `wake`. Starts with the first `wake`."""

    def __init__(self, flush: Callable[[], None], postpone: Callable[[StoreError], None]) -> None:
        self._flush = flush
        self._postpone = postpone
        self._pending = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    def wake(self) -> None:
        """Schedule a flush unless one is scheduled."""
        if self._pending.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agentrl-store", daemon=True)
            self._thread.start()
        self._pending.set()

    def stop(self) -> None:
        """Stop without a flush."""
        self._stopping.set()
        self._pending.set()

    def _run(self) -> None:
        while not self.is_stopped:
            self._pending.wait()
            if self._stopping.wait(LINGER):
                return
            self._pending.clear()
            try:
                self._flush()
            except StoreError as error:  # raised by the next write, in the caller's thread
                self._postpone(error)
            except sqlite3.ProgrammingError:  # the store was closed meanwhile
                return
