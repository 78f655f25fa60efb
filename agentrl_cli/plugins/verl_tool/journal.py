"""The tool server's journal: every call is written before it runs, so that no retry runs it twice.

A SQLite file. A call is a row under its idempotency key; its result is filled in later. A row without a result was in
flight when the server stopped. Closing a trajectory deletes its rows; the closed mark stays for `KEEP` seconds, so
that a second `close` or a late retry is answered and not run again.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.errors import NotFound, StoreError, UsageError

KEEP = 86_400.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS trajectories(
  id TEXT PRIMARY KEY, spec TEXT NOT NULL, opened REAL NOT NULL, closed REAL, rewards TEXT) STRICT;
CREATE TABLE IF NOT EXISTS calls(
  number INTEGER PRIMARY KEY, trajectory TEXT NOT NULL REFERENCES trajectories(id), key TEXT NOT NULL,
  name TEXT NOT NULL, arguments TEXT NOT NULL, result TEXT, UNIQUE(trajectory, key)) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One journalled call. `result` is the answer as JSON, None if pending."""

    number: int
    trajectory: str
    key: str
    name: str
    arguments: Mapping[str, Any]
    result: Mapping[str, Any] | None = None


class Journal:
    """One file, one server. WAL without a sync per commit: survives a crash of the process, at 20 µs a write."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError if another server holds the file, StoreError if it is not a journal."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115 - held until `close`
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UsageError(
                f"Another tool server uses {path}.", hint="Use another journal: --journal FILE"
            ) from error
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
            self._db.execute("DELETE FROM trajectories WHERE closed < ?", (time.time() - KEEP,))
        except sqlite3.DatabaseError as error:
            self.close()
            raise StoreError(
                f"{path} is not a journal: {error}.", hint="Move it, or use --journal FILE."
            ) from error

    def close(self) -> None:
        """Close the file and release its lock."""
        self._db.close()
        self._lock.close()

    # -- trajectories ---------------------------------------------------------------------------------------------

    def open(self, trajectory: str, spec: Mapping[str, Any]) -> None:
        """Store a trajectory and its spec; repeating it with the same spec changes nothing.

        Raises UsageError if it is known with another spec, or closed.
        """
        text = json.dumps(spec, sort_keys=True)
        found = self._db.execute(
            "SELECT spec, closed FROM trajectories WHERE id=?", (trajectory,)
        ).fetchone()
        if found is None:
            self._db.execute(
                "INSERT INTO trajectories VALUES(?,?,?,NULL,NULL)", (trajectory, text, time.time())
            )
        elif found[1] is not None:
            raise UsageError(
                f"The trajectory {trajectory} is closed.", hint="Open one under a new id."
            )
        elif found[0] != text:
            raise UsageError(
                f"The trajectory {trajectory} is open with another task.",
                hint="Ids must be unique.",
            )

    def spec(self, trajectory: str) -> dict[str, Any]:
        """Return the spec of an open trajectory. Raises NotFound if unknown, UsageError if closed."""
        found = self._db.execute(
            "SELECT spec, closed FROM trajectories WHERE id=?", (trajectory,)
        ).fetchone()
        if found is None:
            raise NotFound(f"No trajectory {trajectory} is open.", hint="POST /v1/open first.")
        if found[1] is not None:
            raise UsageError(
                f"The trajectory {trajectory} is closed.", hint="Open one under a new id."
            )
        spec: dict[str, Any] = json.loads(found[0])
        return spec

    def is_known(self, trajectory: str) -> bool:
        """Whether it was ever opened."""
        return (
            self._db.execute("SELECT 1 FROM trajectories WHERE id=?", (trajectory,)).fetchone()
            is not None
        )

    def forget_closed(self, trajectory: str) -> None:
        """Delete the mark of a closed trajectory, so that its id may begin again; nothing for an open one."""
        self._db.execute(
            "DELETE FROM trajectories WHERE id=? AND closed IS NOT NULL", (trajectory,)
        )

    def end(self, trajectory: str) -> bool:
        """Close a trajectory and delete its calls. False if it was closed already or is unknown."""
        self._db.execute("DELETE FROM calls WHERE trajectory=?", (trajectory,))
        cursor = self._db.execute(
            "UPDATE trajectories SET closed=? WHERE id=? AND closed IS NULL",
            (time.time(), trajectory),
        )
        return cursor.rowcount > 0

    def end_all(self, prefix: str) -> None:
        """Close the open trajectories whose ids begin with a prefix, and delete their calls."""
        query = "SELECT id FROM trajectories WHERE closed IS NULL AND substr(id, 1, ?) = ?"
        for (trajectory,) in self._db.execute(query, (len(prefix), prefix)).fetchall():
            self.end(trajectory)

    # -- calls ----------------------------------------------------------------------------------------------------

    def find(self, trajectory: str, key: str) -> Entry | None:
        """Return the call under a key, None if absent."""
        row = self._db.execute(
            "SELECT number, trajectory, key, name, arguments, result FROM calls WHERE trajectory=? AND key=?",
            (trajectory, key),
        ).fetchone()
        return _entry(row) if row else None

    def begin(self, trajectory: str, key: str, name: str, arguments: Mapping[str, Any]) -> Entry:
        """Store a call, before it runs."""
        cursor = self._db.execute(
            "INSERT INTO calls(trajectory, key, name, arguments) VALUES(?,?,?,?)",
            (trajectory, key, name, json.dumps(arguments)),
        )
        return Entry(int(cursor.lastrowid or 0), trajectory, key, name, arguments)

    def finish(self, number: int, result: Mapping[str, Any]) -> None:
        """Store a call's result."""
        self._db.execute("UPDATE calls SET result=? WHERE number=?", (json.dumps(result), number))

    def forget(self, number: int) -> None:
        """Delete a call that did not take place (the sandbox failed); its key may be used again."""
        self._db.execute("DELETE FROM calls WHERE number=?", (number,))

    def calls(self, trajectory: str) -> list[Entry]:
        """Return the finished calls of a trajectory, in the order in which they began."""
        rows = self._db.execute(
            "SELECT number, trajectory, key, name, arguments, result FROM calls "
            "WHERE trajectory=? AND result IS NOT NULL ORDER BY number",
            (trajectory,),
        )
        return [_entry(row) for row in rows]


def _entry(row: tuple[Any, ...]) -> Entry:
    number, trajectory, key, name, arguments, result = row
    return Entry(
        number, trajectory, key, name, json.loads(arguments), json.loads(result) if result else None
    )
