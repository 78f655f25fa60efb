"""The part of a LightningStore that hands out work: rollouts, their attempts, and the workers that take them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal

from agentrl_cli.plugins.lightning.rules import ENDED, NO_WORK, QUEUED, UNSET, Rules, Unset, page
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


LightningStoreCapabilities = dict[str, bool]
"""`thread_safe`, `async_safe`, `zero_copy` (other processes see its records) and `otlp_traces`."""
LightningStoreStatistics = dict[str, Any]
"""`name`, `uptime`, and `total_rollouts`, `total_attempts`, `total_spans` …"""


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
        counts = {f"total_{kind}": count for kind, count in self._records.counts().items()}
        return {"name": type(self).__name__, "uptime": time.time() - self._began, **counts}

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
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        with self._records.file.transaction():
            return self._attempt(self._new(request).rollout_id, worker_id)

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
        with self._records.file.transaction():
            return [self._new(request) for request in rollouts]

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """Take the rollout that waits longest; None if none does."""
        return next(iter(await self.dequeue_many_rollouts(worker_id=worker_id)), None)

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """Take at most so many."""
        self._heal()
        with self._records.file.transaction():
            queued = self._records.select("rollouts", max(0, limit), status=QUEUED)
            taken = [self._attempt(rollout.rollout_id, worker_id) for rollout in queued]
            if worker_id is not None:
                now = time.time()
                idle = {} if taken else {"status": "idle", "last_idle_time": now, **NO_WORK}
                self._worker(worker_id, last_dequeue_time=now, **idle)
            return taken

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None
    ) -> AttemptedRollout:
        """Return a further attempt at a rollout."""
        return self._attempt(rollout_id, worker_id)

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
        return self._change(
            rollout_id,
            input=input,
            mode=mode,
            resources_id=resources_id,
            status=status,
            config=config,
            metadata=metadata,
        )

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
        return self._change_attempt(
            rollout_id,
            attempt_id,
            status=status,
            worker_id=worker_id,
            last_heartbeat_time=last_heartbeat_time,
            metadata=metadata,
        )

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
        any_of = {
            "status": status if status_in is None else status_in,
            "rollout_id": rollout_ids if rollout_id_in is None else rollout_id_in,
        }
        rows = [self._with_attempt(rollout) for rollout in self._records.select("rollouts")]
        holding = {"rollout_id": rollout_id_contains}
        return page(rows, any_of, holding, filter_logic, sort_by, sort_order, limit, offset)

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
        rows: list[Attempt] = self._records.select("attempts", rollout_id=[rollout_id])
        return page(rows, {}, {}, "and", sort_by, sort_order, limit, offset)

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
            known = [rollout for rollout in found if rollout is not None]
            ended = [rollout for rollout in known if rollout.status in ENDED]
            late = deadline is not None and time.monotonic() >= deadline
            if late or len(ended) == len(known):
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
        rows: list[Worker] = self._records.select("workers")
        any_of, holding = {"status": status_in}, {"worker_id": worker_id_contains}
        return page(rows, any_of, holding, filter_logic, sort_by, sort_order, limit, offset)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return one of them; None if unknown."""
        found: Worker | None = self._records.get("workers", worker_id)
        return found

    async def update_worker(
        self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET
    ) -> Worker:
        """Return a sign of life of a runner."""
        now = time.time()
        return self._worker(worker_id, last_heartbeat_time=now, heartbeat_stats=heartbeat_stats)
