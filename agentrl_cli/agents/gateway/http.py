"""HTTP of the gateway: bodies, clients that go away, and streams that stay alive.

Requests are read beside the event loop (`aside`), so that a long one keeps no other client waiting. One thread for all
sessions: requests are read in the order in which they came, and the memory that a long one takes is taken once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentrl_cli.agents.gateway.request import RequestError, bad
from agentrl_cli.types.plain import parse_json

T = TypeVar("T")

MAX_BODY = 32 * 2**20
"""Bytes of a request that are read, at most; how many are kept depends on what it is for, see `body_limit`."""
ROOM = 2**20
"""Bytes of a request beside its texts, and of one that has none for a model."""
ESCAPED = 6
"""Bytes of a character as JSON writes it in ASCII."""
KEEP_ALIVE = 3.0
"""Seconds between the comments of a stream that waits for its answer; its head is sent after a third of that."""
CLOSED = 499
"""nginx's status for a request whose client went away; no one reads it."""


def body_limit(characters: int) -> int:
    """Return the most bytes of a request whose texts may have so many characters."""
    return min(ROOM + ESCAPED * characters, MAX_BODY)


async def json_body(
    request: Request, most: int = ROOM, *, optional: bool = False
) -> Mapping[str, Any]:
    """Return the JSON object of a request's body; with `optional` an empty body is an empty object.

    No more than `most` bytes are kept. Somewhat more are read, as a client that still sends sees no answer.
    Raises RequestError, also for a client that goes away meanwhile.
    """
    data, length = bytearray(), 0
    try:
        async for part in request.stream():
            length += len(part)
            if length <= most:
                data += part
            elif length > MAX_BODY:
                break
    except ClientDisconnect:
        raise RequestError("The client went away.", status=CLOSED, code="client_closed") from None
    if length > most:
        raise RequestError(
            f"The body is larger than {most} bytes.", status=413, code="request_too_large"
        )
    if optional and not data:
        return {}
    try:
        value = parse_json(bytes(data))
    except ValueError as error:
        raise bad(f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad("The body must be a JSON object.")
    return value


async def wait_until_left(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def first(
    work: asyncio.Task[T], left: asyncio.Task[None], timeout: float | None = None
) -> bool:
    """Wait for work or its client's leaving. Returns whether one of them happened; work that no one waits for stops."""
    done, _ = await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout)
    if left in done and work not in done:
        work.cancel()
    return bool(done)


class Stream:
    """A response that sends a comment every `period` seconds until its work is done, then the events of the result.

    `events` gets the finished task and never raises.
    """

    def __init__(
        self,
        work: asyncio.Task[T],
        left: asyncio.Task[None],
        events: Callable[[asyncio.Task[T]], Iterator[str]],
        period: float,
    ) -> None:
        self._work, self._left, self._events, self._period = work, left, events, period

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not await first(self._work, self._left, self._period):
                await send(
                    {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
                )
            if self._work.done() and not self._work.cancelled():
                for event in self._events(self._work):
                    await send(
                        {"type": "http.response.body", "body": event.encode(), "more_body": True}
                    )
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._left.cancel()
            if not self._work.done():
                self._work.cancel()


def events_response(events: Iterator[str]) -> Response:
    """Return all events at once."""
    return Response(
        "".join(events), media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )


P = ParamSpec("P")

_READER = ThreadPoolExecutor(1, thread_name_prefix="gateway-reader")


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in the reading thread and return its result."""
    return await asyncio.get_running_loop().run_in_executor(
        _READER, partial(function, *args, **kwargs)
    )
