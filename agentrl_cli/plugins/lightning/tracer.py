"""Tracers: they collect the spans of an attempt and write them to its store.

Spans come from the emitters, from `operation`, and from the gateway: each model call of an episode is one, with its
token ids. Which trace a span belongs to follows the running code (a context variable), so attempts may run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.agents.emit import CURRENT
from agentrl_cli.plugins.lightning.semconv import LightningEnvVar, resolve_bool_env_var
from agentrl_cli.plugins.lightning.spans import (
    Attributes,
    OtelResource,
    Span,
    SpanCoreFields,
    SpanRecordingContext,
    StatusCode,
    TraceStatus,
    call_spans,
)
from agentrl_cli.plugins.lightning.types import ParallelWorkerBase

_LOG = logging.getLogger(__name__)
FLUSH = 0.5
"""Seconds between writes of the spans of a running attempt."""


@dataclass(eq=False)
class Trace:
    """The spans of one attempt so far."""

    rollout_id: str = ""
    attempt_id: str = ""
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    spans: list[Span] = field(default_factory=list)
    calls: int = 0
    """Turns of the gateway that were looked at."""
    written: int = 0

    def add(self, core: SpanCoreFields, span_id: str = "", parent_id: str | None = None) -> None:
        """Append a span after the model calls before it."""
        self.look()
        ids: dict[str, Any] = {"rollout_id": self.rollout_id, "attempt_id": self.attempt_id}
        origin = {f"agentlightning.{name}": value for name, value in ids.items()}
        made = Span.from_attributes(
            **ids,
            **dict(core),
            trace_id=self.trace_id,
            span_id=span_id or None,
            parent_id=parent_id,
            sequence_id=len(self.spans) + 1,
            resource=OtelResource(attributes=origin),
        )
        self.spans.append(made)
        if resolve_bool_env_var(LightningEnvVar.AGL_EMITTER_DEBUG, fallback=False):
            _LOG.debug("%s: %s", core.name, core.attributes)

    def look(self) -> None:
        """Append the model calls that the gateway has recorded since."""
        call = CURRENT.get(None)
        if call is None or call.recorded is None:
            return
        turns, tokens = call.recorded()
        seen, self.calls = self.calls, len(turns)
        for span in call_spans(turns, tokens, call.model, first=seen):
            self.add(span)

    async def flush(self, store: Any) -> None:
        """Write new spans to the store, with their sequence ids."""
        self.look()
        # Counted before the first await: another flush may begin meanwhile.
        new = self.spans[self.written :]
        if store is None or not new or not self.rollout_id:
            return
        self.written += len(new)
        where = (self.rollout_id, self.attempt_id)
        ids = await store.get_many_span_sequence_ids([where] * len(new))
        for span, sequence_id in zip(new, ids, strict=True):
            span.sequence_id = sequence_id
        await store.add_many_spans(new)


_TRACE: ContextVar[Trace | None] = ContextVar("agentlightning_trace", default=None)
_PARENT: ContextVar[str | None] = ContextVar("agentlightning_parent", default=None)
_ACTIVE: ContextVar[Tracer | None] = ContextVar("agentlightning_tracer", default=None)


class Tracer(ParallelWorkerBase):
    """Collects spans. A subclass may override `trace_context`, `create_span` and `get_last_trace`."""

    _status: StatusCode = "UNSET"
    _keeps = True

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = None

    def init_worker(self, worker_id: int, store: Any = None) -> None:
        """Write to this store from here on."""
        super().init_worker(worker_id)
        self._store = store

    @contextlib.asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: Any = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncIterator[Any]:
        """Everything inside belongs to one attempt. Raises ValueError inside another one."""
        if _ACTIVE.get() is not None:
            raise ValueError("An active tracer is already set. Cannot set a new one.")
        trace = Trace(rollout_id or "", attempt_id or "")
        where = store if store is not None else self._store
        _TRACE.set(trace)  # kept after the end, for get_last_trace
        token = _ACTIVE.set(self)
        over = asyncio.Event()
        writer = asyncio.create_task(_keep_writing(trace, where, over))
        try:
            yield self
        finally:
            _ACTIVE.reset(token)
            over.set()
            await asyncio.wait({writer})
            await trace.flush(where)
            await writer  # raises what a write has raised

    def get_last_trace(self) -> list[Span]:
        """Return the spans of the running or last trace."""
        if (trace := _TRACE.get()) is None:
            return []
        trace.look()
        return list(trace.spans)

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Return a span without duration, added to the running trace."""
        at, ended = timestamp or time.time(), status or TraceStatus(status_code=self._status)
        core = SpanCoreFields(
            name=name, attributes=attributes or {}, start_time=at, end_time=at, status=ended
        )
        if self._keeps:
            _add(core, parent_id=_PARENT.get())
        return core

    @contextlib.contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Iterator[SpanRecordingContext]:
        """Yield a span around what runs inside."""
        began, above = start_time or time.time(), _PARENT.get()
        recording = SpanRecordingContext(
            name=name, attributes=dict(attributes or {}), start_time=began
        )
        token = _PARENT.set(recording.span_id)
        try:
            yield recording
        except Exception as error:
            recording.record_exception(error)
            raise
        finally:
            _PARENT.reset(token)
            recording.end_time = end_time or time.time()
            _add(recording.get_recorded_span(), recording.span_id, above)

    def start_as_current_span(
        self, name: str, attributes: Attributes | None = None
    ) -> contextlib.AbstractContextManager[SpanRecordingContext]:
        """OpenTelemetry's name for `operation_context`."""
        return self.operation_context(name, attributes)

    def trace_run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in a trace of its own."""
        return asyncio.run(self.trace_run_async(func, *args, **kwargs))

    async def trace_run_async(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await a coroutine function, or call another one, in a trace of its own."""
        async with self.trace_context(name=func.__name__):
            answer = func(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer

    def get_langchain_handler(self) -> Any:
        """None: the gateway records the calls of LangChain's models as those of any client."""
        return None

    @contextlib.contextmanager
    def lifespan(self, store: Any = None) -> Iterator[None]:
        """Runs `init` and `teardown` around the block."""
        self.init()
        self.init_worker(0, store)
        try:
            yield
        finally:
            self.teardown_worker(0)
            self.teardown()


class OtelTracer(Tracer):
    """The default. Libraries' own OpenTelemetry spans are not collected."""


class AgentOpsTracer(Tracer):
    """As `OtelTracer`: calls are recorded at the gateway, not by patching clients."""

    def __init__(
        self, *, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True
    ) -> None:
        """The arguments have no effect."""
        super().__init__()


class DummyTracer(Tracer):
    """Makes spans that belong to no trace."""

    _status = "OK"
    _keeps = False


def _add(core: SpanCoreFields, span_id: str = "", parent_id: str | None = None) -> None:
    """Add a span to the running trace; one that has ended is kept for `get_last_trace` alone."""
    if _ACTIVE.get() is not None and (trace := _TRACE.get()) is not None:
        trace.add(core, span_id, parent_id)


def get_active_tracer() -> Tracer | None:
    """Return the tracer whose trace runs; None outside."""
    return _ACTIVE.get()


def set_active_tracer(tracer: Tracer) -> None:
    """Let the emitters use a tracer outside of its `trace_context`. Raises ValueError if there is one."""
    if _ACTIVE.get() is not None:
        raise ValueError("An active tracer is already set. Cannot set a new one.")
    _TRACE.set(Trace())
    _ACTIVE.set(tracer)


def clear_active_tracer() -> None:
    """Undo `set_active_tracer`."""
    _ACTIVE.set(None)


async def _keep_writing(trace: Trace, store: Any, over: asyncio.Event) -> None:
    """Write new spans now and then until it is over. A write that has begun is never cut off: its spans count as
    written.
    """
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), FLUSH)
        await trace.flush(store)
