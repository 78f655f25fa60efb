"""LightningStore: the queue between algorithms and runners, and what attempts leave behind.

`SqliteLightningStore` keeps its records in the file that also has the runs and episodes (`runs/agentrl.db`), where
several processes may share it; `InMemoryLightningStore` in a file of this process's memory. No method waits for
anything while it changes records, so each is atomic.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from agentrl_cli.plugins.lightning.records import Records
from agentrl_cli.plugins.lightning.rules import HEAL, page
from agentrl_cli.plugins.lightning.spans import Span
from agentrl_cli.plugins.lightning.types import NamedResources, PaginatedResult, ResourcesUpdate
from agentrl_cli.plugins.lightning.work_queue import (
    LightningQueue,
    LightningStoreCapabilities,
    LightningStoreStatistics,
)

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "SqliteLightningStore",
]


class LightningStore(LightningQueue):
    """A store over some records, by default in memory. Unknown ids raise ValueError."""

    def __init__(self, records: Records | None = None, heal: float = HEAL) -> None:
        super().__init__(Records(":memory:") if records is None else records, heal)

    # --- spans -------------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        """Keep a span; None if there is one of that id."""
        return next(iter(await self.add_many_spans([span])), None)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Keep spans: a sign of life of their attempts. Returns those that were new."""
        kept = []
        with self._records.file.transaction():
            for span in spans:
                key = f"{span.rollout_id}/{span.attempt_id}/{span.span_id}"
                attempt = self._find_attempt(span.rollout_id, span.attempt_id)
                self._records.raise_to(span.rollout_id, span.sequence_id)
                if self._records.get("spans", key) is None:
                    self._records.put("spans", key, span, span.rollout_id)
                    kept.append(span)
                    self._alive(attempt)
        return kept

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Span | None:
        """Keep OpenTelemetry's `ReadableSpan`."""
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(
            Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id)
        )

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Return a number above all of the rollout's before."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        """One such number for each."""
        with self._records.file.transaction():
            return [self._records.raise_to(rollout_id) for rollout_id, _ in rollout_attempt_ids]

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: Literal["and", "or"] = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Literal["asc", "desc"] = "asc",
    ) -> PaginatedResult[Span]:
        """Spans of a rollout, of one attempt or of all."""
        if attempt_id == "latest":
            latest = self._latest(rollout_id)
            attempt_id = "" if latest is None else latest.attempt_id
        rows = self._records.select("spans", rollout_id=[rollout_id])
        rows = [span for span in rows if attempt_id is None or span.attempt_id == attempt_id]
        equal = {"trace_id": trace_id, "span_id": span_id, "parent_id": parent_id, "name": name}
        any_of = {field: None if value is None else [value] for field, value in equal.items()}
        holding = {
            "trace_id": trace_id_contains,
            "span_id": span_id_contains,
            "parent_id": parent_id_contains,
            "name": name_contains,
        }
        return page(rows, any_of, holding, filter_logic, sort_by, sort_order, limit, offset)

    # --- resources ---------------------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """Return a new version of the resources, under an id of its own."""
        return await self.update_resources(f"rs-{secrets.token_hex(6)}", resources)

    async def update_resources(
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        """Other resources under an id, which are then the latest."""
        now = time.time()
        with self._records.file.transaction():
            old = self._records.get("resources", resources_id)
            update = ResourcesUpdate(
                resources_id=resources_id,
                create_time=now if old is None else old.create_time,
                update_time=now,
                version=1 if old is None else old.version + 1,
                resources=resources,
            )
            self._records.put("resources", resources_id, update)
        return update

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Versions of the resources."""
        rows: list[ResourcesUpdate] = self._records.select("resources")
        any_of = {"resources_id": None if resources_id is None else [resources_id]}
        holding = {"resources_id": resources_id_contains}
        return page(rows, any_of, holding, "and", sort_by, sort_order, limit, offset)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """One version."""
        found: ResourcesUpdate | None = self._records.get("resources", resources_id)
        return found

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the version that was written last."""
        return max(self._records.select("resources"), key=lambda row: row.update_time, default=None)


class InMemoryLightningStore(LightningStore):
    """A store of this process. `thread_safe` has no effect: it always is."""

    def __init__(self, *, thread_safe: bool = True, scan_debounce_seconds: float = HEAL) -> None:
        """`scan_debounce_seconds`: how long attempts may be over their time before that is seen."""
        super().__init__(heal=scan_debounce_seconds)


class SqliteLightningStore(LightningStore):
    """A store in the file of runs and episodes, for several processes; its contents outlive them."""

    def __init__(self, path: str | Path = "runs/agentrl.db") -> None:
        """Raises StoreError."""
        super().__init__(Records(path))

    async def close(self) -> None:
        """Write what waits and close the file."""
        self._records.file.close()


class LightningStoreThreaded(LightningStore):
    """The same store: every store here may be used by threads."""

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store._records)


def __getattr__(name: str) -> Any:
    """Return the two names that Agent-Lightning has here and this package beside its HTTP server."""
    if name in ("LightningStoreClient", "LightningStoreServer"):
        return getattr(import_module("agentrl_cli.plugins.lightning.store_http"), name)
    raise AttributeError(f"{__name__} has no {name!r}")
