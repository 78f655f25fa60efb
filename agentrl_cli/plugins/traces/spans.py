"""Spans as traces: OTLP JSON with GenAI or OpenInference attributes, spans of Phoenix, observations of Langfuse.

Each model call holds its conversation so far; conversations that begin alike share these turns. A trace whose spans
hold no messages, because their content was not recorded, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.plugins.traces.atif_read import stamp
from agentrl_cli.plugins.traces.messages import answer_of, messages_in
from agentrl_cli.plugins.traces.trace import Note, Said, Trace, number_in
from agentrl_cli.types import Message
from agentrl_cli.types.plain import parse_json

SCORES = ("gen_ai.evaluation.score.value", "reward", "score")


@dataclass(slots=True)
class Span:
    """A span of any source."""

    trace: str
    start: float
    end: float
    asked: list[Message] = field(default_factory=list)
    answered: list[Message] = field(default_factory=list)
    model: str = ""
    agent: str = ""
    call: str = ""
    """The id of the tool call that it is."""
    result: Any = None
    error: str = ""
    score: float | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)


def spans_in(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the records of spans in a JSON value; none if it holds no spans."""
    if isinstance(value.get("resourceSpans"), list):
        for resource in value["resourceSpans"]:
            for scope in resource.get("scopeSpans", ()):
                yield from scope.get("spans", ())
    elif isinstance(value.get("observations"), list):
        given = value.get("trace")
        inner = given if isinstance(given, dict) else value
        scores = value.get("scores") or inner.get("scores") or ()
        about = {"traceId": inner.get("id"), "startTime": inner.get("timestamp"), "type": "TRACE"}
        yield {**about, "scores": scores, "output": None, "input": None}
        for one in value["observations"]:
            yield {"traceId": inner.get("id"), **one}
    elif "span_kind" in value or {"traceId", "type", "startTime"} <= value.keys():
        yield value


def read_span(record: Mapping[str, Any]) -> Span:
    """Return a record as a span. Raises ValueError and its like."""
    if "startTimeUnixNano" in record or "attributes" in record:
        return _otel(record)
    found = Span(str(record["traceId"]), stamp(record["startTime"]), stamp(record.get("endTime")))
    found.error = str(record.get("statusMessage") or "") if record.get("level") == "ERROR" else ""
    scores = (number_in(one.get("value")) for one in record.get("scores") or ())
    found.score = next((one for one in scores if one is not None), None)
    if record["type"] == "GENERATION":
        found.model = str(record.get("model") or "")
        found.asked = [*messages_in(record.get("input"))]
        found.answered = [*messages_in(record.get("output"), "assistant")]
    elif record["type"] == "TOOL":
        found.call, found.result = str(record.get("name")), record.get("output")
    return found


def _otel(record: Mapping[str, Any]) -> Span:
    given = record["attributes"]
    flat = (
        {one["key"]: _value(one.get("value") or {}) for one in given}
        if isinstance(given, list)
        else _flat(given)
    )
    context = record.get("context") or {}
    nanos = [_seconds(record.get(f"{name}TimeUnixNano")) for name in ("start", "end")]
    times = [stamp(record.get(f"{name}_time")) for name in ("start", "end")]
    start, end = (one or other for one, other in zip(nanos, times, strict=True))
    found = Span(str(record.get("traceId") or context["trace_id"]), start, end)
    events = [
        {one["key"]: _value(one["value"]) for one in event.get("attributes", ())}
        for event in record.get("events", ())
        if isinstance(event.get("attributes"), list)
    ]
    notes = [one.get("result", one) for one in record.get("annotations") or ()]
    scores: list[Any] = [place.get(name) for place in (flat, *events) for name in SCORES]
    scores += [note.get("score") for note in notes if isinstance(note, dict)]
    found.score = next((one for one in map(number_in, scores) if one is not None), None)
    status = record.get("status") or {}
    failed = status.get("code") in (2, "STATUS_CODE_ERROR") or record.get("status_code") == "ERROR"
    found.error = str(status.get("message") or record.get("status_message") or "error") * failed
    names = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")
    found.model = next((str(flat[name]) for name in names if flat.get(name)), "")
    found.agent = str(flat.get("gen_ai.agent.name") or "")
    kind = flat.get("gen_ai.operation.name") or flat.get("openinference.span.kind")
    if (kind or record.get("span_kind")) in ("execute_tool", "TOOL"):
        ids = ("gen_ai.tool.call.id", "tool_call.id", "gen_ai.tool.name", "tool.name")
        found.call = next((str(flat[name]) for name in ids if flat.get(name)), "")
        found.result = flat.get("gen_ai.tool.call.result", flat.get("output.value"))
    elif kind not in ("invoke_agent", "AGENT", "CHAIN"):
        found.asked = [*messages_in(flat.get("gen_ai.system_instructions"), "system")]
        found.asked += messages_in(
            _collect_list(flat, ("gen_ai.input.messages", "llm.input_messages"))
        )
        answer = _collect_list(flat, ("gen_ai.output.messages", "llm.output_messages"))
        found.answered = [*messages_in(answer, "assistant")]
        tools = flat.get("gen_ai.tool.definitions")
        with suppress(ValueError):
            tools = parse_json(tools) if isinstance(tools, str) else tools
        found.tools = tools if isinstance(tools, list) else []
    return found


def _seconds(nanos: Any) -> float:
    """Return the seconds of nanoseconds, which OTLP's JSON gives as a text; 0 for one out of range."""
    number = float(nanos or 0)
    return number / 1e9 if 0 <= number < 2**64 else 0.0


def _collect_list(flat: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the value of the first name, put together from `NAME.0.role` and so on where it is flattened."""
    for name in names:
        if name in flat:
            return flat[name]
        rows: dict[int, Any] = {}
        for key, value in flat.items():
            parts = key.removeprefix(f"{name}.").split(".")
            if key.startswith(f"{name}.") and parts[0].isdigit():
                place = rows.setdefault(int(parts[0]), {})
                for part in parts[1:-1]:
                    place = place.setdefault(part, {})
                place[parts[-1]] = value
        if rows:
            return _lists([rows[number] for number in sorted(rows)])
    return None


def _lists(value: Any) -> Any:
    """Return a nested value whose mappings with numbers as names are lists."""
    if isinstance(value, list):
        return [_lists(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value and all(key.isdigit() for key in value):
        return [_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _lists(item) for key, item in value.items()}


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested attributes under dotted names; lists as they are."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        inner = _flat(item, f"{before}{key}.") if isinstance(item, dict) else {before + key: item}
        found |= inner
    return found


def _value(given: Mapping[str, Any]) -> Any:
    """Return the value of an OTLP AnyValue."""
    empty: tuple[str, Any] = ("", None)
    kind, value = next(iter(given.items()), empty)
    if kind == "arrayValue":
        return [_value(one) for one in value.get("values", ())]
    if kind == "kvlistValue":
        return {one["key"]: _value(one["value"]) for one in value.get("values", ())}
    return int(value) if kind == "intValue" else value


def traces_of(spans: Mapping[str, list[Span]], note: Note) -> Iterator[Trace]:
    """Yield the traces of spans by trace id."""
    for name, found in spans.items():
        found.sort(key=lambda one: one.start)
        chats = [one for one in found if one.asked or one.answered]
        if not chats:
            note(
                f"Trace {name} is left out: its spans hold no messages (content was not recorded)."
            )
            continue
        answers = {one.call: one for one in found if one.call}
        made = Trace([name, [[one.asked, one.answered] for one in chats]])
        made.paths = [[*_path(one, answers)] for one in chats]
        _add_last(made.paths[-1], answers)
        made.agent = next((one.agent for one in found if one.agent), "")
        made.error = next((one.error for one in found if one.error and not one.call), "")
        made.tools = next((one.tools for one in found if one.tools), ())
        made.reward = next((one.score for one in found if one.score is not None), None)
        if any(one.end and one.end < one.start for one in found):
            note(f"Trace {name}: the clock runs backwards in a span.")
        yield made


def _path(span: Span, answers: Mapping[str, Span]) -> Iterator[Said]:
    for message in span.asked:
        tool = answers.get(message.get("tool_call_id", ""))
        timed = (tool.start, max(0.0, tool.end - tool.start), tool.error or None) if tool else ()
        yield Said(message, *timed)
    for message in span.answered[:1]:
        yield Said(message, span.start, max(0.0, span.end - span.start), model=span.model)


def _add_last(path: list[Said], answers: Mapping[str, Span]) -> None:
    """Add the answers to the last calls, which no further model call repeats."""
    for call in path[-1].message.get("tool_calls", ()):
        span = answers.get(call["id"]) or answers.get(call["function"]["name"])
        if span is not None and span.result is not None:
            message = answer_of({"content": span.result, "id": call["id"]})
            path.append(
                Said(message, span.start, max(0.0, span.end - span.start), span.error or None)
            )
