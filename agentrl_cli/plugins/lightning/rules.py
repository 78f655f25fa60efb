"""The rules of a LightningStore: how rollouts, attempts and workers change together, and the pages of queries."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from agentrl_cli.plugins.lightning.records import Records
from agentrl_cli.plugins.lightning.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    Worker,
)

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
