"""Spans: the record of an attempt. They have OpenTelemetry's fields; the package itself is not needed.

`call_spans` makes spans of an episode's model calls: messages, token ids and log-probabilities, as the adapters read
them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from agentrl_cli.plugins.lightning.semconv import (
    AGL_VIRTUAL,
    LLM_CALL,
    flatten_attributes,
    format_exception_attributes,
)
from agentrl_cli.types import Episode, Message, Tokens, Turn
from agentrl_cli.types.branches import path_to

AttributeValue = (
    str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
)
Attributes = dict[str, Any]
TraceState = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class SpanContext(_Open):
    """Where a span is in its trace."""

    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: TraceState = Field(default_factory=dict)


class TraceStatus(_Open):
    """How a span ended."""

    status_code: StatusCode
    description: str | None = None


class Event(_Open):
    """Something that happened within a span."""

    name: str
    attributes: Attributes
    timestamp: float | None = None


class Link(_Open):
    """A span that this one belongs with."""

    context: SpanContext
    attributes: Attributes | None = None


class OtelResource(BaseModel):
    """The maker of a span."""

    attributes: Attributes = Field(default_factory=dict)
    schema_url: str = ""


class SpanCoreFields(BaseModel):
    """The fields of every span, and a span that belongs to no attempt yet."""

    name: str
    status: TraceStatus = TraceStatus(status_code="UNSET")
    attributes: Attributes = Field(default_factory=dict)
    start_time: float | None = None
    end_time: float | None = None


class SpanRecordingContext(SpanCoreFields):
    """A span that is being recorded."""

    span_id: str = Field(default_factory=lambda: secrets.token_hex(8))

    def record_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        self.attributes.update(attributes)

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set how it ends."""
        self.status = TraceStatus(status_code=status_code, description=description)

    def record_exception(self, exception: BaseException) -> None:
        """Set that it ends by an exception."""
        self.record_status("ERROR", str(exception))
        self.record_attributes(format_exception_attributes(exception))

    def set_attribute(self, key: str, value: Any) -> None:
        """Add one attribute, by OpenTelemetry's name for that."""
        self.attributes[key] = value

    def get_recorded_span(self) -> SpanCoreFields:
        """Return the span. Raises ValueError before its end."""
        if not self.end_time:
            raise ValueError("The span has not ended.")
        return SpanCoreFields(**self.model_dump(exclude={"span_id"}))


class Span(_Open, SpanCoreFields):
    """A span of an attempt. Times are seconds since the epoch."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """Order within the rollout."""
    trace_id: str
    span_id: str
    parent_id: str | None
    events: list[Event]
    links: list[Link]
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
        parent = SpanContext(trace_id=trace, span_id=parent_id) if parent_id else None
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
            context=SpanContext(trace_id=trace, span_id=own),
            parent=parent,
            resource=resource or OtelResource(),
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
        """Return a span from OpenTelemetry's `ReadableSpan`."""
        context, parent = _context(src.get_span_context()), _context(src.parent)
        links = [(_context(link.context), dict(link.attributes or {})) for link in src.links]
        resource, status = src.resource, src.status
        return cls.model_validate(
            {
                "rollout_id": rollout_id,
                "attempt_id": attempt_id,
                "sequence_id": sequence_id,
                "trace_id": context["trace_id"] if context else f"{0:032x}",
                "span_id": context["span_id"] if context else f"{0:016x}",
                "parent_id": parent and parent["span_id"],
                "name": src.name,
                "status": {
                    "status_code": status.status_code.name,
                    "description": status.description,
                },
                "attributes": dict(src.attributes or {}),
                "events": [
                    {
                        "name": event.name,
                        "attributes": dict(event.attributes or {}),
                        "timestamp": _seconds(event.timestamp),
                    }
                    for event in src.events
                ],
                "links": [{"context": at, "attributes": held or None} for at, held in links],
                "start_time": _seconds(src.start_time),
                "end_time": _seconds(src.end_time),
                "context": context,
                "parent": parent,
                "resource": {
                    "attributes": dict(resource.attributes),
                    "schema_url": resource.schema_url or "",
                },
            }
        )


SpanLike = Span
"""Agent-Lightning also means OpenTelemetry's span by this; `Span.from_opentelemetry` makes one from it."""


def _context(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    ids = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
    return {**ids, "is_remote": found.is_remote, "trace_state": dict(found.trace_state or {})}


def _seconds(timestamp: float | None) -> float | None:
    """Seconds from OpenTelemetry's nanoseconds."""
    return timestamp / 1e9 if timestamp and timestamp > 1e12 else timestamp or None


def call_spans(
    turns: Sequence[Turn], tokens: Tokens, model: str, first: int = 0
) -> Iterator[SpanCoreFields]:
    """Yield a span for each sampled turn from index `first` on; `tokens` has the spans of all turns."""
    parents = Episode("", "", turns=tuple(turns)).parents
    for index in range(first, len(turns)):
        turn = turns[index]
        sampled = np.flatnonzero(tokens.trained_mask[turn.start : turn.end]) + turn.start
        if turn.role != "assistant" or not len(sampled):
            continue
        before = [turns[other] for other in path_to(parents, index)[:-1]]
        prompt = [id_ for other in before for id_ in tokens.ids[other.start : other.end].tolist()]
        asked = [_message(message) for other in before for message in other.messages]
        said = [_message(message) for message in turn.messages]
        reason = turn.stop_reason.value if turn.stop_reason else ""
        said[0]["finish_reason"] = "tool_calls" if turn.calls else reason
        answer = f"turn-{index}-{turn.started:.6f}"
        logprobs = [{"logprob": value} for value in tokens.logp_sampled[sampled].tolist()]
        yield SpanCoreFields(
            name=LLM_CALL,
            attributes={
                **flatten_attributes({"gen_ai": {"prompt": asked, "completion": said}}),
                "gen_ai.request.model": model,
                "gen_ai.response.model": turn.weights_version,
                "gen_ai.response.id": answer,
                "prompt_token_ids": prompt + tokens.ids[turn.start : sampled[0]].tolist(),
                "response_token_ids": tokens.ids[sampled].tolist(),
                "logprobs.content": json.dumps(logprobs),
            },
            start_time=turn.started,
            end_time=turn.started + turn.seconds,
            status=TraceStatus(status_code="OK"),
        )


def _message(message: Message) -> dict[str, Any]:
    """Return a message as attributes of a span nest it."""
    found: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("tool_call_id"):
        found["tool_call_id"] = message["tool_call_id"]
    calls = [(call.get("id", ""), call["function"]) for call in message.get("tool_calls") or ()]
    found["tool_calls"] = [
        {
            "id": key,
            "name": function["name"],
            "arguments": function["arguments"]
            if isinstance(function["arguments"], str)
            else json.dumps(function["arguments"], ensure_ascii=False),
        }
        for key, function in calls
    ]
    return found
