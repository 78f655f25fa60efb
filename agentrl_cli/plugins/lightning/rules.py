"""The rules of a LightningStore: how rollouts, attempts and workers change together, and the pages of queries.

Its records are in the table `lightning` of a store file, or of one in memory.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from agentrl_cli.plugins.lightning.spans import Span
from agentrl_cli.plugins.lightning.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Worker,
)
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


T = TypeVar("T")
QUEUED, RUNNING, ENDED = (
    ("queuing", "requeuing"),
    ("preparing", "running"),
    ("failed", "succeeded", "cancelled"),
)
HEAL = 0.2
"""Seconds between looks for attempts that are over their time."""
NO_WORK = {"current_rollout_id": None, "current_attempt_id": None}


class Unset:
    """Marks an argument that was not given."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = Unset()


class Rules:
    """The steps of a store's methods, each within one transaction."""

    def __init__(self, records: Records, heal: float = HEAL) -> None:
        self._records = records
        self._began, self._healed, self._heal_every = time.time(), 0.0, heal

    def _new(self, request: EnqueueRolloutRequest) -> Rollout:
        newest = max(
            self._records.select("resources"), key=lambda row: row.update_time, default=None
        )
        made = Rollout(
            rollout_id=f"ro-{secrets.token_hex(6)}",
            input=request.input,
            start_time=time.time(),
            mode=request.mode,
            resources_id=request.resources_id or (newest and newest.resources_id),
            config=request.config.model_copy(deep=True) if request.config else RolloutConfig(),
            metadata=dict(request.metadata or {}),
        )
        self._records.put("rollouts", made.rollout_id, made)
        return made

    def _attempt(self, rollout_id: str, worker_id: str | None) -> AttemptedRollout:
        """Return a rollout with a further attempt, which prepares now."""
        with self._records.file.transaction():
            latest = self._latest(rollout_id)
            attempt = Attempt(
                rollout_id=rollout_id,
                attempt_id=f"at-{secrets.token_hex(4)}",
                sequence_id=1 if latest is None else latest.sequence_id + 1,
                start_time=time.time(),
                worker_id=worker_id,
            )
            rollout = self._change(rollout_id, status="preparing")
            self._records.put("attempts", attempt.attempt_id, attempt, rollout_id)
            self._sync(attempt)
        return AttemptedRollout(**dict(rollout), attempt=attempt)

    def _rollout(self, rollout_id: str) -> Rollout:
        found: Rollout | None = self._records.get("rollouts", rollout_id)
        if found is None:
            raise ValueError(f"Rollout {rollout_id} not found")
        return found

    def _latest(self, rollout_id: str) -> Attempt | None:
        attempts = self._records.select("attempts", rollout_id=[rollout_id])
        return max(attempts, key=lambda row: row.sequence_id, default=None)

    def _find_attempt(self, rollout_id: str, attempt_id: str) -> Attempt:
        found: Attempt | None = self._records.get("attempts", attempt_id)
        if found is None or found.rollout_id != self._rollout(rollout_id).rollout_id:
            raise ValueError(f"Attempt {attempt_id} not found for rollout {rollout_id}")
        return found

    def _with_attempt(self, rollout: Rollout) -> AttemptedRollout | Rollout:
        """Return the rollout with its last attempt, if it had any."""
        latest = self._latest(rollout.rollout_id)
        return rollout if latest is None else AttemptedRollout(**dict(rollout), attempt=latest)

    def _change(self, rollout_id: str, **changes: Any) -> Rollout:
        """Change the fields of a rollout that are given."""
        with self._records.file.transaction():
            ended = {"end_time": time.time()} if changes.get("status") in ENDED else {}
            new = {**dict(self._rollout(rollout_id)), **given_only(changes), **ended}
            changed = Rollout.model_validate(new)
            self._records.put("rollouts", rollout_id, changed)
        return changed

    def _change_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> Attempt:
        """Change the given fields of an attempt; its worker follows, and, if it is the last one, its rollout."""
        with self._records.file.transaction():
            rollout, latest = self._rollout(rollout_id), self._latest(rollout_id)
            if latest is None:
                raise ValueError(f"No attempts found for rollout {rollout_id}")
            old = latest if attempt_id == "latest" else self._find_attempt(rollout_id, attempt_id)
            given = given_only(changes)
            ended = {"end_time": time.time()} if given.get("status") in ENDED else {}
            attempt = Attempt.model_validate({**dict(old), **given, **ended})
            self._records.put("attempts", attempt.attempt_id, attempt, rollout_id)
            if "status" in given or "worker_id" in given:
                self._sync(attempt)
            status = status_after(attempt, rollout.config)
            if attempt.attempt_id == latest.attempt_id and status != rollout.status:
                self._change(rollout_id, status=status)
        return attempt

    def _alive(self, attempt: Attempt) -> None:
        """Note a sign of life: the attempt and its rollout run."""
        changes: dict[str, Any] = {"last_heartbeat_time": time.time()}
        if attempt.status in ("preparing", "unresponsive"):
            changes["status"] = "running"
        fresh = attempt.model_copy(update=changes)
        self._records.put("attempts", attempt.attempt_id, fresh, attempt.rollout_id)
        rollout, latest = self._rollout(attempt.rollout_id), self._latest(attempt.rollout_id)
        last = latest is not None and latest.attempt_id == attempt.attempt_id
        if last and rollout.status in ("preparing", "requeuing"):
            self._change(rollout.rollout_id, status="running")

    def _heal(self) -> None:
        """End the attempts that are over their time or give no sign of life."""
        now = time.time()
        if now - self._healed < self._heal_every:
            return
        self._healed = now
        with self._records.file.transaction():
            for rollout in self._records.select("rollouts", status=RUNNING):
                latest, limits = self._latest(rollout.rollout_id), rollout.config
                if latest is None:
                    continue
                silent = now - (latest.last_heartbeat_time or latest.start_time)
                if now - latest.start_time > (limits.timeout_seconds or math.inf):
                    self._change_attempt(rollout.rollout_id, "latest", status="timeout")
                elif silent > (limits.unresponsive_seconds or math.inf):
                    self._change_attempt(rollout.rollout_id, "latest", status="unresponsive")

    def _worker(self, worker_id: str, **changes: Any) -> Worker:
        """Change the given fields of a worker, which is added if it is new."""
        with self._records.file.transaction():
            known = self._records.get("workers", worker_id) or Worker(worker_id=worker_id)
            worker = Worker.model_validate({**dict(known), **given_only(changes)})
            self._records.put("workers", worker_id, worker)
        return worker

    def _sync(self, attempt: Attempt) -> None:
        """Set the worker of an attempt busy with it, idle after it, or unknown if the attempt was lost."""
        if not attempt.worker_id:
            return
        now = time.time()
        if attempt.status in ("succeeded", "failed"):
            changes = {"status": "idle", "last_idle_time": now, **NO_WORK}
        elif attempt.status in ("unresponsive", "timeout"):
            changes = {"status": "unknown", **NO_WORK}
        else:
            current = {"current_rollout_id": attempt.rollout_id}
            current["current_attempt_id"] = attempt.attempt_id
            changes = {"status": "busy", "last_busy_time": now, **current}
        self._worker(attempt.worker_id, **changes)


def status_after(attempt: Attempt, config: RolloutConfig) -> str:
    """Return the status of a rollout whose last attempt this is."""
    if attempt.status in ("preparing", "running", "succeeded"):
        return attempt.status
    again = attempt.status in config.retry_condition and attempt.sequence_id < config.max_attempts
    return "requeuing" if again else "failed"


def given_only(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given."""
    return {name: value for name, value in arguments.items() if not isinstance(value, Unset)}


def page(
    rows: list[T],
    any_of: Mapping[str, Sequence[Any] | None],
    holding: Mapping[str, str | None],
    logic: str,
    sort_by: str | None,
    sort_order: str,
    limit: int,
    offset: int,
) -> PaginatedResult[T]:
    """Return a page of the rows that pass all tests, or, by `logic`, any of them; a test of None is none.

    `any_of`: field → values, one of which it has. `holding`: field → a text in it. Raises ValueError for an unknown
    field to sort by.
    """
    fields = [(field, values) for field, values in any_of.items() if values is not None]
    texts = [(field, text) for field, text in holding.items() if text is not None]
    enough = any if logic == "or" else all

    def passes(row: T) -> bool:
        exact = [getattr(row, field) in values for field, values in fields]
        return enough(exact + [text in (getattr(row, field) or "") for field, text in texts])

    if fields or texts:
        rows = [row for row in rows if passes(row)]
    if sort_by is not None and rows:
        if not hasattr(rows[0], sort_by):
            raise ValueError(f"Unknown field {sort_by!r} to sort by.")

        def key(row: T) -> tuple[bool, Any]:
            return getattr(row, sort_by) is None, getattr(row, sort_by)

        rows = sorted(rows, key=key, reverse=sort_order == "desc")
    shown = rows[offset:] if limit < 0 else rows[offset : offset + limit]
    return PaginatedResult(items=shown, limit=limit, offset=offset, total=len(rows))
