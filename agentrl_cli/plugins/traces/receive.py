"""Receives OTLP over HTTP on loopback, as JSON or protobuf, at /v1/traces: `agentrl import otlp --listen 4318`.

A trace is written when its root comes, which an exporter sends last; one without a root at the end.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl_cli.agents.gateway.request import RequestError
from agentrl_cli.errors import needs_extra
from agentrl_cli.plugins.traces.load import add
from agentrl_cli.plugins.traces.spans import Span, read_span, spans_in, traces_of
from agentrl_cli.plugins.traces.trace import ERRORS, say
from agentrl_cli.store import Store
from agentrl_cli.types.plain import parse_json

with needs_extra("--listen needs opentelemetry-proto.", "otel"):
    from google.protobuf.json_format import MessageToDict, ParseDict
    from google.protobuf.message import DecodeError
    from google.rpc.status_pb2 import Status
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

LARGEST = 16 * 2**20
"""Bytes of a request, packed and unpacked."""
HELD = 4 * LARGEST
"""Bytes of requests whose traces wait for their root; above that all are written."""
KNOWN = 10_000
"""Traces that were written of which a later span is still known."""
JSON, PROTOBUF = "application/json", "application/x-protobuf"


class Inbox:
    """Traces on their way into a store, all in one run."""

    def __init__(self, store: Store, note: Callable[[str], None]) -> None:
        """Take sentences on the parts that are left out with `note`."""
        self._store, self._note = store, note
        self._waiting: dict[str, list[Span]] = {}
        self._written: dict[str, None] = {}
        self._held: Counter[str] = Counter()
        self._run = ""
        self.ids: list[str] = []
        """The episodes so far."""
        self.app = Starlette(routes=[Route("/v1/traces", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        try:
            data = await _body(request, kind)
            records = [*spans_in(await asyncio.to_thread(_read, data, kind))]
        except ClientDisconnect:
            return Response(status_code=499)
        except (RequestError, *ERRORS) as error:
            status = error.status if isinstance(error, RequestError) else 400
            return _answer({"message": str(error)}, kind, Status(), status)
        left, roots = [], []
        for record in records:
            try:
                span = read_span(record)
                if span.trace in self._written:
                    raise ValueError(f"the trace {span.trace[:40]} is written")
                self._waiting.setdefault(span.trace, []).append(span)
                self._held[span.trace] += len(data) // len(records)
                whole = any(one.asked or one.answered for one in self._waiting[span.trace])
                roots += [span.trace] * (whole and not record.get("parentSpanId"))
            except ERRORS as error:
                left.append(f"A span is left out: {say(error)}.")
        if roots:
            self.write(roots)
        if self._held.total() > HELD:
            self.write()
        partial = {"rejectedSpans": str(len(left)), "errorMessage": left[0][:300]} if left else {}
        body = {"partialSuccess": partial} if left else {}
        return _answer(body, kind, service.ExportTraceServiceResponse())

    def write(self, names: list[str] | None = None) -> None:
        """Write traces by name, without names all that wait."""
        due = {
            name: self._waiting[name] for name in names or self._waiting if name in self._waiting
        }
        found = traces_of(due, self._note)
        ids, self._run = add(found, self._store, Path("received"), self._note, self._run)
        for name in due:  # they still wait if the store could not be written
            del self._waiting[name], self._held[name]
        self._written |= dict.fromkeys(due)
        for name in [*self._written][:-KNOWN]:
            del self._written[name]
        self.ids += ids


def _answer(body: Mapping[str, Any], kind: str, made: Any, status: int = 200) -> Response:
    """Return an answer in the form of its request."""
    if kind != PROTOBUF:
        return JSONResponse(body, status)
    return Response(ParseDict(body, made).SerializeToString(), status, media_type=PROTOBUF)


async def _body(request: Request, kind: str) -> bytes:
    """Return the unpacked body. Raises RequestError, ClientDisconnect."""
    packed = request.headers.get("content-encoding", "identity")
    if kind not in (JSON, PROTOBUF) or packed not in ("identity", "gzip"):
        text = (
            f"The body is {kind or 'of no type'}, {packed}; it may be {JSON} or {PROTOBUF}, gzip."
        )
        raise RequestError(text, status=415)
    unpack, data, length = zlib.decompressobj(wbits=31), bytearray(), 0
    async for part in request.stream():
        length += len(part)
        try:
            data += part if packed != "gzip" else unpack.decompress(part, LARGEST + 1 - len(data))
        except zlib.error as error:
            raise RequestError(f"The body is not gzip: {error}.") from error
        if max(len(data), length) > LARGEST:
            raise RequestError(f"The body is larger than {LARGEST} bytes.", status=413)
    return bytes(data)


def _read(data: bytes, kind: str) -> dict[str, Any]:
    """Return an export as the JSON of OTLP. Raises ValueError and its like."""
    if kind == JSON:
        value = parse_json(data)
        if not isinstance(value, dict) or not isinstance(value.get("resourceSpans"), list):
            raise ValueError("The body is not an export of OTLP: it has no list resourceSpans.")
        return value
    try:
        found = MessageToDict(service.ExportTraceServiceRequest.FromString(data))
    except DecodeError as error:
        raise ValueError(f"The body is not an export of OTLP: {error}.") from error
    for span in spans_in({"resourceSpans": [], **found}):
        assert isinstance(span, dict)
        ids = {name: span[name] for name in ("traceId", "spanId", "parentSpanId") if name in span}
        span |= {name: base64.b64decode(text).hex() for name, text in ids.items()}
    return {"resourceSpans": [], **found}
