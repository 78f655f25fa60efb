"""The rules of a LightningStore: how rollouts, attempts and workers change together; filters and pages of queries."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from agentrl_cli.plugins.lightning.records import MemoryRecords, Records
from agentrl_cli.plugins.lightning.spans import Span
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


class Unset:
    """Marks an argument that was not given."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = Unset()


class Rules:
    """The steps of a store's methods. Callers hold `records.atomic()`."""

    def __init__(self, records: Records | None = None, heal: float = HEAL) -> None:
        self._records = MemoryRecords() if records is None else records
        self._began, self._healed, self._heal_every = time.time(), 0.0, heal

    def _new(self, request: EnqueueRolloutRequest) -> Rollout:
        resources_id = request.resources_id
        if resources_id is None:
            rows = self._records.select("resources")
            resources_id = max(rows, key=lambda row: row.update_time).resources_id if rows else None
        made = Rollout(
            rollout_id=f"ro-{secrets.token_hex(6)}",
            input=request.input,
            start_time=time.time(),
            mode=request.mode,
            resources_id=resources_id,
            config=request.config.model_copy(deep=True) if request.config else RolloutConfig(),
            metadata=dict(request.metadata or {}),
        )
        self._records.put("rollouts", made.rollout_id, made)
        return made

    def _attempt(self, rollout: Rollout, worker_id: str | None) -> AttemptedRollout:
        """Return a further attempt, which prepares now."""
        attempt = Attempt(
            rollout_id=rollout.rollout_id,
            attempt_id=f"at-{secrets.token_hex(4)}",
            sequence_id=len(self._records.select("attempts", rollout.rollout_id)) + 1,
            start_time=time.time(),
            worker_id=worker_id,
        )
        self._records.put("attempts", attempt.attempt_id, attempt, rollout.rollout_id)
        rollout = self._change(rollout, status="preparing")
        self._sync(attempt)
        return AttemptedRollout(**dict(rollout), attempt=attempt)

    def _rollout(self, rollout_id: str) -> Rollout:
        found: Rollout | None = self._records.get("rollouts", rollout_id)
        if found is None:
            raise ValueError(f"Rollout {rollout_id} not found")
        return found

    def _latest(self, rollout_id: str) -> Attempt | None:
        return max(
            self._records.select("attempts", rollout_id),
            key=lambda row: row.sequence_id,
            default=None,
        )

    def _find_attempt(self, rollout_id: str, attempt_id: str) -> Attempt:
        self._rollout(rollout_id)
        found: Attempt | None = self._records.get("attempts", attempt_id)
        if found is None or found.rollout_id != rollout_id:
            raise ValueError(f"Attempt {attempt_id} not found for rollout {rollout_id}")
        return found

    def _with_attempt(self, rollout: Rollout) -> AttemptedRollout | Rollout:
        """Return the rollout with its last attempt, if it had any."""
        latest = self._latest(rollout.rollout_id)
        return rollout if latest is None else AttemptedRollout(**dict(rollout), attempt=latest)

    def _change(self, rollout: Rollout, **changes: Any) -> Rollout:
        if changes.get("status") in ENDED:
            changes["end_time"] = time.time()
        changed = Rollout.model_validate({**dict(rollout), **changes})
        self._records.put("rollouts", rollout.rollout_id, changed)
        return changed

    def _update_attempt(self, rollout_id: str, attempt_id: str, changes: dict[str, Any]) -> Attempt:
        rollout, latest = self._rollout(rollout_id), self._latest(rollout_id)
        if latest is None:
            raise ValueError(f"No attempts found for rollout {rollout_id}")
        attempt = latest if attempt_id == "latest" else self._find_attempt(rollout_id, attempt_id)
        if changes.get("status") in ENDED:
            changes["end_time"] = time.time()
        attempt = Attempt.model_validate({**dict(attempt), **changes})
        self._records.put("attempts", attempt.attempt_id, attempt, rollout_id)
        if "status" in changes or "worker_id" in changes:
            self._sync(attempt)
        if (
            attempt.attempt_id == latest.attempt_id
            and (status := follows(attempt, rollout.config)) != rollout.status
        ):
            self._change(rollout, status=status)
        return attempt

    def _alive(self, attempt: Attempt) -> None:
        """Note a sign of life: the attempt and its rollout run."""
        changes: dict[str, Any] = {"last_heartbeat_time": time.time()}
        if attempt.status in ("preparing", "unresponsive"):
            changes["status"] = "running"
        fresh = self._find_attempt(attempt.rollout_id, attempt.attempt_id).model_copy(
            update=changes
        )
        self._records.put("attempts", attempt.attempt_id, fresh, attempt.rollout_id)
        rollout, latest = self._rollout(attempt.rollout_id), self._latest(attempt.rollout_id)
        last = latest is not None and latest.attempt_id == attempt.attempt_id
        if last and rollout.status in ("preparing", "requeuing"):
            self._change(rollout, status="running")

    def _heal(self) -> None:
        """End the attempts that are over their time or give no sign of life."""
        now = time.time()
        if now - self._healed < self._heal_every:
            return
        self._healed = now
        with self._records.atomic():
            for rollout in self._records.select("rollouts", status=RUNNING):
                latest, limits = self._latest(rollout.rollout_id), rollout.config
                if latest is None:
                    continue
                seen = latest.last_heartbeat_time or latest.start_time
                if (
                    limits.timeout_seconds is not None
                    and now - latest.start_time > limits.timeout_seconds
                ):
                    self._update_attempt(
                        rollout.rollout_id, latest.attempt_id, {"status": "timeout"}
                    )
                elif (
                    limits.unresponsive_seconds is not None
                    and now - seen > limits.unresponsive_seconds
                ):
                    self._update_attempt(
                        rollout.rollout_id, latest.attempt_id, {"status": "unresponsive"}
                    )

    def _worker(self, worker_id: str, **changes: Any) -> Worker:
        known = self._records.get("workers", worker_id) or Worker(worker_id=worker_id)
        worker = Worker.model_validate({**dict(known), **changes})
        self._records.put("workers", worker_id, worker)
        return worker

    def _sync(self, attempt: Attempt) -> None:
        """Set the worker of an attempt busy with it, idle after it, or unknown if the attempt was lost."""
        if not attempt.worker_id:
            return
        now = time.time()
        if attempt.status in ("succeeded", "failed"):
            self._worker(attempt.worker_id, **idle(now))
        elif attempt.status in ("unresponsive", "timeout"):
            self._worker(
                attempt.worker_id,
                status="unknown",
                current_rollout_id=None,
                current_attempt_id=None,
            )
        else:
            current = {
                "current_rollout_id": attempt.rollout_id,
                "current_attempt_id": attempt.attempt_id,
            }
            self._worker(attempt.worker_id, status="busy", last_busy_time=now, **current)


def follows(attempt: Attempt, config: RolloutConfig) -> str:
    """Return the status of a rollout whose last attempt this is."""
    if attempt.status in ("preparing", "running", "succeeded"):
        return attempt.status
    again = attempt.status in config.retry_condition and attempt.sequence_id < config.max_attempts
    return "requeuing" if again else "failed"


def idle(now: float) -> dict[str, Any]:
    """Return the fields of a worker without work."""
    return {
        "status": "idle",
        "last_idle_time": now,
        "current_rollout_id": None,
        "current_attempt_id": None,
    }


def span_key(span: Span) -> str:
    """Return the key of a span."""
    return f"{span.rollout_id}/{span.attempt_id}/{span.span_id}"


def given_only(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given."""
    return {name: value for name, value in arguments.items() if not isinstance(value, Unset)}


Test = Callable[[Any], bool] | None


def is_in(field: str, values: Sequence[Any] | None) -> Test:
    """That a field has one of these values; None: no such test."""
    return None if values is None else lambda row: getattr(row, field) in values


def contains(field: str, text: str | None) -> Test:
    """That a field holds this text; None: no such test."""
    return None if text is None else lambda row: text in (getattr(row, field) or "")


def select_rows(rows: list[T], tests: Sequence[Test], logic: str) -> list[T]:
    """Return the rows that pass all tests, or any of them."""
    real, enough = [test for test in tests if test is not None], any if logic == "or" else all
    return [row for row in rows if enough(test(row) for test in real)] if real else rows


def page(
    rows: list[T], sort_by: str | None, sort_order: str, limit: int, offset: int
) -> PaginatedResult[T]:
    """Return a page of rows. Raises ValueError for a field that they do not have."""
    if sort_by is not None and rows:
        if not hasattr(rows[0], sort_by):
            raise ValueError(f"Unknown field {sort_by!r} to sort by.")

        def key(row: T) -> tuple[bool, Any]:
            return getattr(row, sort_by) is None, getattr(row, sort_by)

        rows = sorted(rows, key=key, reverse=sort_order == "desc")
    shown = rows[offset:] if limit < 0 else rows[offset : offset + limit]
    return PaginatedResult(items=shown, limit=limit, offset=offset, total=len(rows))
