"""Receives OTLP over HTTP on loopback, as JSON or protobuf, at /v1/traces: `agentrl import otlp --listen 4318`.

A trace is written when its root has come and no more follows, when nothing of it came for long, or at the end.
"""

from __future__ import annotations

import asyncio
import base64
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl_cli.errors import MissingDependency
from agentrl_cli.plugins.traces.load import ERRORS, add
from agentrl_cli.plugins.traces.spans import Span, read_span, spans_in, traces_of
from agentrl_cli.store import Store
from agentrl_cli.types.plain import parse_json

LARGEST = 16 * 2**20
"""Bytes of a request, packed and unpacked."""
HELD = 4 * LARGEST
"""Bytes of requests whose traces are not written yet."""
SETTLED, IDLE = 2.0, 60.0
"""Seconds without a span after which a trace is written: with its root, and without one."""
FORGOTTEN = 10_000
"""Traces that were written of which later spans are still known."""
JSON, PROTOBUF = "application/json", "application/x-protobuf"
IDS = ("traceId", "spanId", "parentSpanId")


@dataclass(slots=True)
class _Waiting:
    """A trace that is not complete yet."""

    spans: list[Span] = field(default_factory=list)
    rooted: bool = False
    seen: float = 0.0


class Refused(Exception):
    """A request that is not taken: status and sentence."""


class Inbox:
    """Traces on their way into a store, all in one run."""

    def __init__(self, store: Store, note: Callable[[str], None]) -> None:
        """Take sentences on what is left out with `note`."""
        self._store, self._note = store, note
        self._waiting: dict[str, _Waiting] = {}
        self._written: dict[str, None] = {}
        self._held = 0
        self._run = ""
        self.ids: list[str] = []
        """The episodes so far."""
        self.app = Starlette(routes=[Route("/v1/traces", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        try:
            if kind not in (JSON, PROTOBUF):
                raise Refused(415, f"The body is {kind or 'of no type'}: {JSON} or {PROTOBUF}.")
            data = await _body(request)
            value = await asyncio.to_thread(_read, data, kind)
            left = [self._add(record) for record in spans_in(value)]
        except ClientDisconnect:
            return Response(status_code=499)
        except (Refused, *ERRORS) as error:
            status, said = error.args if isinstance(error, Refused) else (400, str(error))
            return JSONResponse({"message": said}, status)
        self._held += len(data)
        if self._held > HELD:
            self.sweep(whole=True)
        return _answer(kind, [one for one in left if one])

    def _add(self, record: Any) -> str:
        """Keep a span; return why it is left out, if it is."""
        try:
            span = read_span(record)
        except ERRORS as error:
            return f"A span is left out: {type(error).__name__} {error}."
        if span.trace in self._written:
            return f"A span is left out: its trace {span.trace[:40]} is written."
        found = self._waiting.setdefault(span.trace, _Waiting())
        found.spans.append(span)
        found.rooted |= not record.get("parentSpanId")
        found.seen = time.monotonic()
        return ""

    def sweep(self, *, whole: bool = False) -> None:
        """Write the traces that are complete; with `whole` all."""
        now = time.monotonic()
        due = {
            name: self._waiting.pop(name).spans
            for name, one in [*self._waiting.items()]
            if whole or now - one.seen > (SETTLED if one.rooted else IDLE)
        }
        if not self._waiting:
            self._held = 0
        if not due:
            return
        self._written |= dict.fromkeys(due)
        for name in [*self._written][:-FORGOTTEN]:
            del self._written[name]
        problems: list[str] = []
        found = [*traces_of(due, problems.append)]
        ids, self._run = add(found, self._store, Path("received"), problems, self._run)
        self.ids += ids
        for text in problems:
            self._note(text)


async def _body(request: Request) -> bytes:
    """Return the unpacked body. Raises Refused, ClientDisconnect."""
    packed = request.headers.get("content-encoding", "identity")
    if packed not in ("identity", "gzip"):
        raise Refused(415, f"Content-Encoding: {packed} is not known; gzip is.")
    unpack = zlib.decompressobj(wbits=31) if packed == "gzip" else None
    data, length = bytearray(), 0
    async for part in request.stream():
        length += len(part)
        try:
            data += part if unpack is None else unpack.decompress(part, LARGEST + 1 - len(data))
        except zlib.error as error:
            raise Refused(400, f"The body is not gzip: {error}.") from error
        if len(data) > LARGEST or length > LARGEST:
            raise Refused(413, f"The body is larger than {LARGEST} bytes.")
    return bytes(data)


def _read(data: bytes, kind: str) -> dict[str, Any]:
    """Return an export as the JSON of OTLP. Raises ValueError and its like, MissingDependency."""
    if kind == JSON:
        value = parse_json(data)
        if not isinstance(value, dict) or not isinstance(value.get("resourceSpans"), list):
            raise ValueError("The body is not an export of OTLP: it has no list resourceSpans.")
        return value
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        found: dict[str, Any] = MessageToDict(ExportTraceServiceRequest.FromString(data))
    except DecodeError as error:
        raise ValueError(f"The body is not an export of OTLP: {error}.") from error
    for span in spans_in({"resourceSpans": [], **found}):
        assert isinstance(span, dict)
        span |= {name: base64.b64decode(span[name]).hex() for name in IDS if name in span}
        span.setdefault("attributes", [])
    return found


def _answer(kind: str, left: list[str]) -> Response:
    """Return the answer to an export, with the number of spans that are left out."""
    partial = {"rejectedSpans": str(len(left)), "errorMessage": left[0][:300]} if left else {}
    body = {"partialSuccess": partial} if left else {}
    if kind == JSON:
        return JSONResponse(body)
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    message = ParseDict(body, ExportTraceServiceResponse())
    return Response(message.SerializeToString(), media_type=PROTOBUF)


def require_proto() -> None:
    """Raise MissingDependency unless protobuf can be read."""
    try:
        import opentelemetry.proto.collector.trace.v1.trace_service_pb2  # noqa: F401
    except ImportError as error:
        hint = "pip install 'agentrl-cli[otel]'"
        raise MissingDependency("--listen needs opentelemetry-proto.", hint=hint) from error
