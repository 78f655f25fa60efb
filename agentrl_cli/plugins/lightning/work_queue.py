"""The part of a LightningStore that hands out work: rollouts, their attempts, and the workers that take them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from agentrl_cli.plugins.lightning.records import KINDS
from agentrl_cli.plugins.lightning.store_rules import (
    ENDED,
    QUEUED,
    UNSET,
    Rules,
    Unset,
    contains,
    given_only,
    idle,
    is_in,
    page,
    select_rows,
)
from agentrl_cli.plugins.lightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Worker,
    WorkerStatus,
)

POLL = 0.05
"""Seconds between looks for rollouts that ended."""


class LightningStoreCapabilities(TypedDict, total=False):
    """The abilities of a store."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    otlp_traces: bool


class LightningStoreStatistics(TypedDict, total=False):
    """How much is in a store."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float


class LightningQueue(Rules):
    """The part of a store that hands out work."""

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Its abilities."""
        return {
            "thread_safe": True,
            "async_safe": True,
            "zero_copy": self._records.shared,
            "otlp_traces": False,
        }

    async def statistics(self) -> LightningStoreStatistics:
        """Return how much it holds."""
        counts = {f"total_{kind}": self._records.count(kind) for kind in KINDS}
        return {"name": type(self).__name__, "uptime": time.time() - self._began, **counts}  # type: ignore[typeddict-item]

    def otlp_traces_endpoint(self) -> str:
        """Raises NotImplementedError: spans are added by the runner and the gateway."""
        raise NotImplementedError(f"{type(self).__name__} receives no OTLP traces.")

    # --- rollouts and attempts ---------------------------------------------------------------------------------------

    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        """Return a rollout whose first attempt begins now, past the queue."""
        with self._records.atomic():
            request = EnqueueRolloutRequest(
                input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
            )
            return self._attempt(self._new(request), worker_id)

    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        """Return a rollout for a runner to take."""
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        return (await self.enqueue_many_rollouts([request]))[0]

    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest]
    ) -> Sequence[Rollout]:
        """Queue rollouts for runners, in order."""
        with self._records.atomic():
            return [self._new(request) for request in rollouts]

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """Take the rollout that waits longest; None if none does."""
        found = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return found[0] if found else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """Take at most so many."""
        self._heal()
        with self._records.atomic():
            queued = self._records.select("rollouts", status=QUEUED, limit=max(0, limit))
            taken = [self._attempt(rollout, worker_id) for rollout in queued]
            if worker_id is not None:
                now = time.time()
                self._worker(worker_id, last_dequeue_time=now, **({} if taken else idle(now)))
            return taken

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None
    ) -> AttemptedRollout:
        """Return a further attempt at a rollout."""
        with self._records.atomic():
            return self._attempt(self._rollout(rollout_id), worker_id)

    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        """Change the given fields."""
        given = dict(
            input=input,
            mode=mode,
            resources_id=resources_id,
            status=status,
            config=config,
            metadata=metadata,
        )
        with self._records.atomic():
            return self._change(self._rollout(rollout_id), **given_only(given))

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Attempt:
        """Change the given fields; the rollout's status follows that of its last attempt."""
        given = dict(
            status=status,
            worker_id=worker_id,
            last_heartbeat_time=last_heartbeat_time,
            metadata=metadata,
        )
        with self._records.atomic():
            return self._update_attempt(rollout_id, attempt_id, given_only(given))

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[AttemptedRollout | Rollout]:
        """Return rollouts with their last attempts. `status` and `rollout_ids` are the old names of two filters."""
        self._heal()
        states = status_in if status_in is not None else status
        ids = rollout_id_in if rollout_id_in is not None else rollout_ids
        tests = [
            is_in("status", states),
            is_in("rollout_id", ids),
            contains("rollout_id", rollout_id_contains),
        ]
        rows = [self._with_attempt(rollout) for rollout in self._records.select("rollouts")]
        return page(select_rows(rows, tests, filter_logic), sort_by, sort_order, limit, offset)

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Return the attempts at a rollout."""
        self._heal()
        return page(
            self._records.select("attempts", rollout_id), sort_by, sort_order, limit, offset
        )

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        """Return a rollout with its last attempt."""
        self._heal()
        found = self._records.get("rollouts", rollout_id)
        return None if found is None else self._with_attempt(found)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the last attempt at a rollout."""
        self._heal()
        return self._latest(rollout_id)

    async def wait_for_rollouts(
        self, *, rollout_ids: list[str], timeout: float | None = None
    ) -> list[AttemptedRollout | Rollout]:
        """Return those that have ended, at the latest after `timeout` seconds; 0 only looks."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._heal()
            found = [self._records.get("rollouts", id_) for id_ in rollout_ids]
            ended = [
                rollout for rollout in found if rollout is not None and rollout.status in ENDED
            ]
            known = sum(rollout is not None for rollout in found)
            if len(ended) == known or (deadline is not None and time.monotonic() >= deadline):
                return [self._with_attempt(rollout) for rollout in ended]
            await asyncio.sleep(POLL)

    # --- workers -----------------------------------------------------------------------------------------------------

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Return the runners that were heard of."""
        tests = [is_in("status", status_in), contains("worker_id", worker_id_contains)]
        rows = select_rows(self._records.select("workers"), tests, filter_logic)
        return page(rows, sort_by, sort_order, limit, offset)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return one of them; None if unknown."""
        found: Worker | None = self._records.get("workers", worker_id)
        return found

    async def update_worker(
        self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET
    ) -> Worker:
        """Return a sign of life of a runner."""
        with self._records.atomic():
            stats = given_only({"heartbeat_stats": heartbeat_stats})
            return self._worker(worker_id, last_heartbeat_time=time.time(), **stats)
