"""Where a LightningStore keeps its records: the table `lightning` of a store file, or of one in memory."""

from __future__ import annotations

import itertools
import time
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


class Records(PluginPart):
    """Records by id, as JSON in a file that other processes may use, or in memory as the objects themselves."""

    table = "lightning"

    def __init__(self, path: Path | str) -> None:
        """Raises StoreError."""
        super().__init__(Store.open(path))
        self.shared = str(path) != ":memory:"
        """Whether other processes see them."""
        self._objects: dict[tuple[str, str], Any] = {}

    def put(self, kind: str, key: str, record: Any, rollout_id: str = "") -> None:
        """Add or replace a record. Raises ValueError for one that a file must hold and JSON cannot."""
        data = self._encode(kind, key, record) if self.shared else ""
        status = getattr(record, "status", "")
        status = status if isinstance(status, str) else ""
        with self.file.transaction() as conn:
            # A change of status moves the record behind all others of the new one.
            conn.execute(
                "INSERT INTO lightning (kind, id, rollout_id, status, n, data) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (kind, id) DO UPDATE SET data = excluded.data, status = excluded.status,"
                " n = CASE WHEN status = excluded.status THEN n ELSE excluded.n END",
                (kind, key, rollout_id, status, time.time_ns(), data),
            )
            if not self.shared:
                self._objects[kind, key] = record.model_copy()

    def _encode(self, kind: str, key: str, record: Any) -> str:
        try:
            data: str = record.model_dump_json()
            KINDS[kind].model_validate_json(data)
        except (PydanticSerializationError, ValidationError) as error:
            raise ValueError(f"The record {key} cannot be kept in SQLite: {error}") from error
        return data

    def select(self, kind: str, limit: int = -1, **where: Sequence[str]) -> list[Any]:
        """Return the records whose columns have one of these values, oldest first."""
        tests = [
            f"{column} IN ({', '.join('?' * len(any_of))})" for column, any_of in where.items()
        ]
        order = "n, rowid" if "status" in where else "rowid"
        query = f"SELECT id, data FROM lightning WHERE {' AND '.join(['kind = ?', *tests])}"
        values = (kind, *itertools.chain(*where.values()), limit)
        rows = self.file.select(f"{query} ORDER BY {order} LIMIT ?", values)
        if self.shared:
            return [KINDS[kind].model_validate_json(data) for _, data in rows]
        return [self._objects[kind, key].model_copy() for key, _ in rows]

    def get(self, kind: str, key: str) -> Any:
        """Return one record; None if absent."""
        return next(iter(self.select(kind, id=[key])), None)

    def counts(self) -> dict[str, int]:
        """Return the number of records of each kind."""
        rows = self.file.select("SELECT kind, count(*) FROM lightning GROUP BY kind")
        return {kind: dict(rows).get(kind, 0) for kind in KINDS}

    def raise_to(self, rollout_id: str, number: int | None = None) -> int:
        """Raise a rollout's counter to a number, or by one, and return it."""
        with self.file.transaction() as conn:
            row = conn.execute(
                "INSERT INTO lightning (kind, id, rollout_id, status, n, data) VALUES ('counter', ?1, '', '', ?2, '{}')"
                " ON CONFLICT (kind, id) DO UPDATE SET n = CASE WHEN ?3 IS NULL THEN n + 1 ELSE max(n, ?3) END"
                " RETURNING n",
                (rollout_id, 1 if number is None else number, number),
            )
            return int(row.fetchone()[0])
