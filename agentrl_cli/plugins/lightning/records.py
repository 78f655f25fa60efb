"""Where a LightningStore keeps its records: in memory, or in the table `lightning` of a store file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from agentrl_cli.plugins.lightning.spans import Span
from agentrl_cli.plugins.lightning.types import Attempt, ResourcesUpdate, Rollout, Worker
from agentrl_cli.store import Store
from agentrl_cli.store.file import PluginPart

TABLE = """
CREATE TABLE IF NOT EXISTS lightning (
    kind TEXT NOT NULL, id TEXT NOT NULL, rollout_id TEXT NOT NULL, status TEXT NOT NULL, n INTEGER NOT NULL,
    data TEXT NOT NULL, PRIMARY KEY (kind, id)
) STRICT;
CREATE INDEX IF NOT EXISTS lightning_rollout ON lightning (kind, rollout_id);
CREATE INDEX IF NOT EXISTS lightning_status ON lightning (kind, status, n);
"""

KINDS: dict[str, type[BaseModel]] = {
    "rollouts": Rollout,
    "attempts": Attempt,
    "spans": Span,
    "resources": ResourcesUpdate,
    "workers": Worker,
}


class MemoryRecords:
    """Records by id, as objects of this process; any thread may use them.

    Those of a rollout, and those with a status, are found by it, oldest first. Writes in a block of `atomic` take
    effect at once. `raise_to` raises a rollout's counter to a number, or by one, and returns it.
    """

    shared = False
    """Whether other processes see them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self._of: dict[tuple[str, str], dict[str, None]] = {}
        """(kind, "r:" rollout or "s:" status) → keys, in order."""
        self._counters: dict[str, int] = {}

    def atomic(self) -> contextlib.AbstractContextManager[Any]:
        return self._lock

    def get(self, kind: str, key: str) -> Any:
        with self._lock:
            found = self._rows[kind].get(key)
            return None if found is None else found.model_copy()

    def put(self, kind: str, key: str, record: Any, rollout_id: str = "") -> None:
        with self._lock:
            old = self._rows[kind].get(key)
            self._rows[kind][key] = record.model_copy()
            if rollout_id:
                self._of.setdefault((kind, f"r:{rollout_id}"), {})[key] = None
            status = getattr(record, "status", None)
            if isinstance(status, str) and (old is None or old.status != status):
                if old is not None:
                    self._of[kind, f"s:{old.status}"].pop(key, None)
                self._of.setdefault((kind, f"s:{status}"), {})[key] = None

    def select(
        self,
        kind: str,
        rollout_id: str | None = None,
        status: Sequence[str] | None = None,
        limit: int = -1,
    ) -> list[Any]:
        with self._lock:
            if status is not None:
                keys = [key for one in status for key in self._of.get((kind, f"s:{one}"), ())]
            elif rollout_id is not None:
                keys = list(self._of.get((kind, f"r:{rollout_id}"), ()))
            else:
                keys = list(self._rows[kind])
            return [
                self._rows[kind][key].model_copy() for key in (keys if limit < 0 else keys[:limit])
            ]

    def count(self, kind: str) -> int:
        return len(self._rows[kind])

    def raise_to(self, rollout_id: str, number: int | None = None) -> int:
        with self._lock:
            now = self._counters.get(rollout_id, 0)
            self._counters[rollout_id] = now + 1 if number is None else max(now, number)
            return self._counters[rollout_id]


class SqliteRecords(PluginPart):
    """Records as JSON in a store file; other processes may use it at the same time."""

    table = "lightning"
    shared = True

    def __init__(self, path: Path | str) -> None:
        """Raises StoreError."""
        self.store = Store.open(path)
        super().__init__(self.store)

    def atomic(self) -> contextlib.AbstractContextManager[Any]:
        return self.store.transaction()

    def get(self, kind: str, key: str) -> Any:
        row = self.store.select_one("SELECT data FROM lightning WHERE kind=? AND id=?", (kind, key))
        return None if row is None else KINDS[kind].model_validate_json(row[0])

    def put(self, kind: str, key: str, record: Any, rollout_id: str = "") -> None:
        """Raises ValueError for a record that JSON cannot hold."""
        try:
            data = record.model_dump_json()
            KINDS[kind].model_validate_json(data)
        except (PydanticSerializationError, ValidationError) as error:
            raise ValueError(f"The record {key} cannot be kept in SQLite: {error}") from error
        status = getattr(record, "status", "")
        status = status if isinstance(status, str) else ""
        with self.store.transaction() as conn:
            conn.execute(
                "INSERT INTO lightning (kind, id, rollout_id, status, n, data)"
                " VALUES (?1, ?2, ?3, ?4, (SELECT coalesce(max(n), 0) + 1 FROM lightning WHERE kind = ?1), ?5)"
                " ON CONFLICT (kind, id) DO UPDATE SET data = excluded.data, status = excluded.status,"
                " n = CASE WHEN status = excluded.status THEN n ELSE excluded.n END",
                (kind, key, rollout_id, status, data),
            )

    def select(
        self,
        kind: str,
        rollout_id: str | None = None,
        status: Sequence[str] | None = None,
        limit: int = -1,
    ) -> list[Any]:
        where, values = "kind = ?", [kind]
        if status is not None:
            where, values = (
                f"kind = ? AND status IN ({', '.join('?' * len(status))})",
                [kind, *status],
            )
        elif rollout_id is not None:
            where, values = "kind = ? AND rollout_id = ?", [kind, rollout_id]
        order = "n" if status is not None else "rowid"
        rows = self.store.select(
            f"SELECT data FROM lightning WHERE {where} ORDER BY {order} LIMIT ?", (*values, limit)
        )
        return [KINDS[kind].model_validate_json(data) for (data,) in rows]

    def count(self, kind: str) -> int:
        row = self.store.select_one("SELECT count(*) FROM lightning WHERE kind = ?", (kind,))
        return int(row[0]) if row else 0

    def raise_to(self, rollout_id: str, number: int | None = None) -> int:
        with self.store.transaction() as conn:
            conn.execute(
                "INSERT INTO lightning (kind, id, rollout_id, status, n, data) VALUES ('counter', ?1, '', '', ?2, '{}')"
                " ON CONFLICT (kind, id) DO UPDATE SET n = CASE WHEN ?3 IS NULL THEN n + 1 ELSE max(n, ?3) END",
                (rollout_id, 1 if number is None else number, number),
            )
            row = conn.execute(
                "SELECT n FROM lightning WHERE kind = 'counter' AND id = ?", (rollout_id,)
            ).fetchone()
            return int(row[0])


Records = MemoryRecords | SqliteRecords
