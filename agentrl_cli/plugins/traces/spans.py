"""Spans as traces: OTLP JSON with GenAI or OpenInference attributes, spans of Phoenix, observations of Langfuse.

Each model call holds its conversation so far; conversations that begin alike share these turns. A trace whose spans
hold no messages of a known form is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.hooks.loggers import flat, nest
from agentrl_cli.plugins.traces.atif_read import stamp
from agentrl_cli.plugins.traces.messages import answer_of, messages_in
from agentrl_cli.plugins.traces.trace import Note, Said, Trace, number_in
from agentrl_cli.types import Message
from agentrl_cli.types.plain import parse_json

MODELS = (
    "gen_ai.response.model",
    "gen_ai.request.model",
    "llm.model_name",
    "langfuse.observation.model.name",
)
KINDS = ("gen_ai.operation.name", "openinference.span.kind", "langfuse.observation.type")
ASKED = (
    "gen_ai.input.messages",
    "llm.input_messages",
    "gen_ai.prompt",
    "langfuse.observation.input",
)
ANSWERED = (
    "gen_ai.output.messages",
    "llm.output_messages",
    "gen_ai.completion",
    "langfuse.observation.output",
)
RESULTS = ("gen_ai.tool.call.result", "output.value", "langfuse.observation.output")
_UNREAD = re.compile(
    r"(?!.*(?:type|finish_reasons?)$).*(?:input|output|prompt|completion|messages?\b|content)"
)
LONE = ({"traceId", "type", "startTime"}, {"context", "attributes", "start_time"})
"""Keys of a span that is a record of its own: of Langfuse, of the SDK's console exporter."""
NO_CONTENT = "content was not recorded"
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
    tool: str = ""
    """The name of the tool that it ran."""
    result: Any = None
    error: str = ""
    score: float | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Names of attributes that may hold messages in a form of their own."""


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
    elif "span_kind" in value or any(keys <= value.keys() for keys in LONE):
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
        found.tools = tools_in(record.get("input"))
        found.answered = [*messages_in(record.get("output"), "assistant")]
    elif record["type"] == "TOOL":
        found.tool, found.result = str(record.get("name") or "tool"), record.get("output")
    return found


def _otel(record: Mapping[str, Any]) -> Span:
    flat = _flat_of(record.get("attributes") or [])
    context = record.get("context") or {}
    nanos = [_seconds(record.get(f"{name}TimeUnixNano")) for name in ("start", "end")]
    times = [stamp(record.get(f"{name}_time")) for name in ("start", "end")]
    start, end = (one or other for one, other in zip(nanos, times, strict=True))
    found = Span(str(record.get("traceId") or context["trace_id"]), start, end)
    events = [
        (str(event.get("name")), _flat_of(event.get("attributes") or []))
        for event in record.get("events") or ()
    ]
    notes = [one.get("result", one) for one in record.get("annotations") or ()]
    places = (flat, *(given for _, given in events))
    scores: list[Any] = [place.get(name) for place in places for name in SCORES]
    scores += [note.get("score") for note in notes if isinstance(note, dict)]
    found.score = next((one for one in map(number_in, scores) if one is not None), None)
    status = record.get("status") or {}
    codes = (status.get("code"), status.get("status_code"), record.get("status_code"))
    failed = not {2, "STATUS_CODE_ERROR", "ERROR"}.isdisjoint(codes)
    words = (status.get("message"), status.get("description"), record.get("status_message"))
    found.error = str(next(filter(None, words), "error")) * failed
    found.model = _first(flat, MODELS)
    found.agent = str(flat.get("gen_ai.agent.name") or "")
    kind = _first(flat, KINDS) or record.get("span_kind")
    if kind in ("execute_tool", "TOOL", "tool"):
        found.call = _first(flat, ("gen_ai.tool.call.id", "tool_call.id"))
        found.tool = _first(flat, ("gen_ai.tool.name", "tool.name")) or str(record.get("name"))
        found.result = next((flat[name] for name in RESULTS if name in flat), None)
    elif kind not in ("invoke_agent", "AGENT", "CHAIN", "agent", "chain", "span"):
        found.asked = [*messages_in(flat.get("gen_ai.system_instructions"), "system")]
        found.asked += messages_in(_collect_list(flat, ASKED))
        found.answered = [*messages_in(_collect_list(flat, ANSWERED), "assistant")]
        for name, given in events:
            said = name.removeprefix("gen_ai.").partition(".")
            if said[2] == "message":
                found.asked += messages_in({"role": said[0], **given})
            elif said[0] == "choice":
                found.answered += messages_in(given.get("message", given), "assistant")
        found.tools = tools_in(_collect_list(flat, ("gen_ai.tool.definitions", "llm.tools")))
        texts = (name for name, value in flat.items() if isinstance(value, (str, list)))
        found.unread = [name for name in texts if _UNREAD.search(name)]
    return found


def _flat_of(given: Any) -> dict[str, Any]:
    """Return attributes by their dotted names, from the list of OTLP or from nested mappings."""
    if isinstance(given, list):
        return {one["key"]: _value(one.get("value") or {}) for one in given}
    return {name: value for name, value in flat(given).items() if value != {}}


def _first(flat: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((str(flat[name]) for name in names if flat.get(name)), "")


def tools_in(given: Any) -> list[dict[str, Any]]:
    """Return the schemas of tools, which may be a text of JSON, or lie under other names."""
    with suppress(ValueError):
        given = parse_json(given) if isinstance(given, str) else given
    if isinstance(given, dict):
        return tools_in(given.get("tools") or [])
    found = []
    for one in given if isinstance(given, list) else ():
        one = one.get("tool", one) if isinstance(one, dict) else one
        one = one.get("json_schema", one) if isinstance(one, dict) else one
        with suppress(ValueError):
            found.append(parse_json(one) if isinstance(one, str) else one)
    return [one for one in found if isinstance(one, dict)]


def _seconds(nanos: Any) -> float:
    """Return the seconds of nanoseconds, which OTLP's JSON gives as a text; 0 for one out of range."""
    number = float(nanos or 0)
    return number / 1e9 if 0 <= number < 2**64 else 0.0


def _collect_list(flat: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the value of the first name, put together from `NAME.0.role` and so on where it is flattened."""
    for name in names:
        if name in flat:
            return flat[name]
        start = f"{name}."
        rows = {key.removeprefix(start): one for key, one in flat.items() if key.startswith(start)}
        rows = {key: one for key, one in rows.items() if key.partition(".")[0].isdecimal()}
        if rows:
            return nest(rows, gaps=True)
    return None


def _value(given: Mapping[str, Any]) -> Any:
    """Return the value of an OTLP AnyValue."""
    empty: tuple[str, Any] = ("", None)
    kind, value = next(iter(given.items()), empty)
    if kind == "arrayValue":
        return [_value(one) for one in value.get("values", ())]
    if kind == "kvlistValue":
        return _flat_of(value.get("values", []))
    return int(value) if kind == "intValue" else value


def traces_of(spans: Mapping[str, list[Span]], note: Note) -> Iterator[Trace]:
    """Yield the traces of spans by trace id."""
    for name, found in spans.items():
        found.sort(key=lambda one: one.start)
        chats = [one for one in found if one.asked or one.answered]
        if not chats:
            names = [*dict.fromkeys(name for one in found for name in one.unread)]
            why = f"attributes of an unknown form: {', '.join(names[:4])}" if names else NO_CONTENT
            note(f"Trace {name} is left out: its spans hold no messages ({why}).")
            continue
        made = Trace([name, [[one.asked, one.answered] for one in chats]])
        tools = _Tools([one for one in found if one.tool])
        made.paths = [[*_path(one, tools)] for one in chats]
        made.paths[-1] += [*_last(made.paths[-1], tools)]
        made.agent = next((one.agent for one in found if one.agent), "")
        made.error = next((one.error for one in found if one.error and not one.tool), "")
        made.tools = next((one.tools for one in found if one.tools), ())
        made.reward = next((one.score for one in found if one.score is not None), None)
        if any(one.end and one.end < one.start for one in found):
            note(f"Trace {name}: the clock runs backwards in a span.")
        yield made


class _Tools:
    """Spans of tools by the calls that they ran: by the call's id, else in their order by the tool's name."""

    def __init__(self, spans: list[Span]) -> None:
        self._left = spans
        self._taken: dict[tuple[str, int], Span | None] = {}

    def find(self, id: str, name: str, place: int, by: float, text: str | None) -> Span | None:
        """Return the span of a call whose answer, at a place of a path, was there by a time."""
        if (id, place) not in self._taken:
            own = [one for one in self._left if one.call and one.call == id]
            own = own or [
                one for one in self._left if not one.call and one.tool == name and one.start <= by
            ]
            same = (one for one in own if answer_of({"result": one.result})["content"] == text)
            found = self._taken[id, place] = next(same, own[0] if own else None)
            self._left = [one for one in self._left if one is not found]
        return self._taken[id, place]


def _path(span: Span, tools: _Tools) -> Iterator[Said]:
    calls: list[dict[str, Any]] = []
    for place, message in enumerate(span.asked):
        if message["role"] != "tool":
            calls = [*message.get("tool_calls", ())]
            yield Said(message)
            continue
        id = message.get("tool_call_id", "")
        call = next((one for one in calls if one["id"] == id), calls[0] if calls else None)
        calls = [one for one in calls if one is not call]
        name = call["function"]["name"] if call else ""
        yield _add_times(message, tools.find(id, name, place, span.start, message["content"]))
    for message in span.answered[:1]:
        yield Said(message, span.start, max(0.0, span.end - span.start), model=span.model)


def _last(path: list[Said], tools: _Tools) -> Iterator[Said]:
    """Yield the answers to the last calls, which no further model call repeats."""
    for place, call in enumerate(path[-1].message.get("tool_calls", ()), len(path)):
        found = tools.find(call["id"], call["function"]["name"], place, math.inf, None)
        if found is not None and (found.result is not None or found.error):
            text = found.error if found.result is None else found.result
            yield _add_times(answer_of({"content": text, "id": call["id"]}), found)


def _add_times(message: Message, span: Span | None) -> Said:
    if span is None:
        return Said(message)
    return Said(message, span.start, max(0.0, span.end - span.start), span.error or None)
