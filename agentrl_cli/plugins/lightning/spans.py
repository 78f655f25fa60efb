"""Spans: the record of an attempt. They have OpenTelemetry's fields; the package itself is not needed.

`call_spans` makes spans of an episode's model calls: messages, token ids and log-probabilities, as the adapters read
them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentrl_cli.plugins.lightning.semconv import AGL_VIRTUAL, LLM_CALL
from agentrl_cli.types import Episode, Message, Tokens, Turn
from agentrl_cli.types.branches import path_to

AttributeValue = (
    str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
)
Attributes = dict[str, Any]
TraceState = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]


class SpanContext(BaseModel):
    """Where a span is in its trace."""

    model_config = ConfigDict(extra="allow")
    trace_id: str
    span_id: str
    is_remote: bool
    trace_state: TraceState

    @classmethod
    def from_opentelemetry(cls, src: Any) -> SpanContext:
        """From OpenTelemetry's own."""
        ids = {"trace_id": f"{src.trace_id:032x}", "span_id": f"{src.span_id:016x}"}
        return cls(**ids, is_remote=src.is_remote, trace_state=dict(src.trace_state or {}))


class TraceStatus(BaseModel):
    """How a span ended."""

    model_config = ConfigDict(extra="allow")
    status_code: StatusCode
    description: str | None = None

    @classmethod
    def from_opentelemetry(cls, src: Any) -> TraceStatus:
        """From OpenTelemetry's own."""
        return cls(status_code=src.status_code.name, description=src.description)


class Event(BaseModel):
    """Something that happened within a span."""

    model_config = ConfigDict(extra="allow")
    name: str
    attributes: Attributes
    timestamp: float | None = None


class Link(BaseModel):
    """A span that this one belongs with."""

    model_config = ConfigDict(extra="allow")
    context: SpanContext
    attributes: Attributes | None = None


class OtelResource(BaseModel):
    """The maker of a span."""

    attributes: Attributes
    schema_url: str


class SpanCoreFields(BaseModel):
    """A span that belongs to no attempt yet."""

    name: str
    status: TraceStatus
    attributes: Attributes
    start_time: float | None
    end_time: float | None


class SpanRecordingContext(Protocol):
    """A span that is being recorded."""

    def record_exception(self, exception: BaseException) -> None: ...

    def record_attributes(self, attributes: Attributes) -> None: ...

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None: ...

    def get_recorded_span(self) -> SpanCoreFields: ...


class Span(BaseModel):
    """A span of an attempt. Times are seconds since the epoch."""

    model_config = ConfigDict(extra="allow")
    rollout_id: str
    attempt_id: str
    sequence_id: int
    """Order within the rollout."""
    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    status: TraceStatus
    attributes: Attributes
    events: list[Event]
    links: list[Link]
    start_time: float | None
    end_time: float | None
    context: SpanContext | None
    parent: SpanContext | None
    resource: OtelResource

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Attributes,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: TraceStatus | None = None,
    ) -> Span:
        """Return a span with these attributes; ids are made if they are not given."""
        trace, own = trace_id or secrets.token_hex(16), span_id or secrets.token_hex(8)
        parent = (
            SpanContext(trace_id=trace, span_id=parent_id, is_remote=False, trace_state={})
            if parent_id
            else None
        )
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace,
            span_id=own,
            parent_id=parent_id,
            name=name or AGL_VIRTUAL,
            status=status or TraceStatus(status_code="OK"),
            attributes=attributes,
            events=[],
            links=[],
            start_time=start_time,
            end_time=end_time,
            context=SpanContext(trace_id=trace, span_id=own, is_remote=False, trace_state={}),
            parent=parent,
            resource=resource or OtelResource(attributes={}, schema_url=""),
        )

    @classmethod
    def from_core_fields(
        cls,
        core: SpanCoreFields,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
    ) -> Span:
        """Return a span of an attempt from one of none."""
        return cls.from_attributes(
            attributes=core.attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=core.name,
            start_time=core.start_time or time.time(),
            end_time=core.end_time,
            status=core.status,
        )

    @classmethod
    def from_opentelemetry(
        cls, src: Any, rollout_id: str, attempt_id: str, sequence_id: int
    ) -> Span:
        """Makes a span from OpenTelemetry's `ReadableSpan`."""
        context, parent = src.get_span_context(), src.parent
        made = cls.from_attributes(
            attributes=dict(src.attributes or {}),
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=src.name,
            trace_id=f"{context.trace_id if context else 0:032x}",
            span_id=f"{context.span_id if context else 0:016x}",
            parent_id=f"{parent.span_id:016x}" if parent else None,
            start_time=_seconds(src.start_time),
            end_time=_seconds(src.end_time),
            status=TraceStatus.from_opentelemetry(src.status),
            resource=OtelResource(
                attributes=dict(src.resource.attributes), schema_url=src.resource.schema_url or ""
            ),
        )
        events = [
            Event(name=e.name, attributes=dict(e.attributes or {}), timestamp=_seconds(e.timestamp))
            for e in src.events
        ]
        links = [
            Link(
                context=SpanContext.from_opentelemetry(link.context),
                attributes=dict(link.attributes or {}) or None,
            )
            for link in src.links
        ]
        return made.model_copy(
            update={
                "events": events,
                "links": links,
                "context": SpanContext.from_opentelemetry(context) if context else None,
                "parent": SpanContext.from_opentelemetry(parent) if parent else None,
            }
        )


SpanLike = Span
"""Agent-Lightning also means OpenTelemetry's span by this; `Span.from_opentelemetry` makes one from it."""


def _seconds(timestamp: float | None) -> float | None:
    """Seconds from OpenTelemetry's nanoseconds."""
    return timestamp / 1e9 if timestamp and timestamp > 1e12 else timestamp or None


def call_spans(
    turns: Sequence[Turn], tokens: Tokens, model: str, first: int = 0
) -> Iterator[SpanCoreFields]:
    """One span for each sampled turn from index `first` on; `tokens` has the spans of all turns."""
    parents = Episode("", "", turns=tuple(turns)).parents
    for index in range(first, len(turns)):
        turn = turns[index]
        sampled = np.flatnonzero(tokens.trained_mask[turn.start : turn.end]) + turn.start
        if turn.role != "assistant" or not len(sampled):
            continue
        before = [turns[other] for other in path_to(parents, index)[:-1]]
        prompt = [
            *(id_ for other in before for id_ in tokens.ids[other.start : other.end].tolist())
        ]
        prompt += tokens.ids[turn.start : sampled[0]].tolist()
        ids = tokens.ids[sampled].tolist()
        attributes: dict[str, Any] = {
            "gen_ai.request.model": model,
            "gen_ai.response.model": turn.weights_version,
            "gen_ai.response.id": f"turn-{index}-{turn.started:.6f}",
            "prompt_token_ids": prompt,
            "response_token_ids": ids,
            "logprobs.content": json.dumps(
                [{"logprob": value} for value in tokens.logp_sampled[sampled].tolist()]
            ),
        }
        said = [message for other in before for message in other.messages]
        for name, messages in (("prompt", said), ("completion", turn.messages)):
            for number, message in enumerate(messages):
                attributes |= _message_attributes(f"gen_ai.{name}.{number}", message)
        reason = turn.stop_reason.value if turn.stop_reason else ""
        attributes["gen_ai.completion.0.finish_reason"] = "tool_calls" if turn.calls else reason
        ended = turn.started + turn.seconds
        ok = TraceStatus(status_code="OK")
        yield SpanCoreFields(
            name=LLM_CALL, attributes=attributes, start_time=turn.started, end_time=ended, status=ok
        )


def _message_attributes(prefix: str, message: Message) -> Mapping[str, Any]:
    found = {f"{prefix}.role": message["role"], f"{prefix}.content": message.get("content") or ""}
    if message.get("tool_call_id"):
        found[f"{prefix}.tool_call_id"] = message["tool_call_id"]
    for number, call in enumerate(message.get("tool_calls") or ()):
        function, place = call["function"], f"{prefix}.tool_calls.{number}"
        arguments = function["arguments"]
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        found |= {
            f"{place}.id": call.get("id", ""),
            f"{place}.name": function["name"],
            f"{place}.arguments": text,
        }
    return found
