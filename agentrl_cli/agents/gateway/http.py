"""HTTP of the gateway: listening, bodies, clients that go away, and streams that stay alive.

Requests are read beside the event loop (`aside`), so that a long one keeps no other client waiting. One thread for all
sessions: requests are read in the order in which they came, and the memory that a long one takes is taken once.

Every server here checks host, origin and token before it answers. Any web page can send requests to this machine, and
one that maps its own name to this address (DNS rebinding) can read the answers. Neither can choose the Host and Origin
headers that a browser sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl_cli.agents.gateway.dialects.base import openai_error
from agentrl_cli.agents.gateway.request import RequestError, bad
from agentrl_cli.errors import EnvError, UsageError
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


P = ParamSpec("P")

_READER = ThreadPoolExecutor(1, thread_name_prefix="gateway-reader")


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in the reading thread and return its result."""
    return await asyncio.get_running_loop().run_in_executor(
        _READER, partial(function, *args, **kwargs)
    )


def is_loopback(host: str) -> bool:
    """Whether a host is localhost, or an address that never leaves this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def place_of(host: str, port: int) -> str:
    """Return HOST:PORT as an address has it: with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_served(netloc: str, names: Collection[str]) -> bool:
    """Whether a Host header names this server, by one of its names (any port) or by an IP address."""
    try:
        host = urlsplit(f"//{netloc}").hostname or ""
        if host.casefold() in names:
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_foreign(origin: str | None, hosts: Collection[str]) -> bool:
    """Whether a request comes from a page that is not from one of these hosts (with their ports)."""
    try:
        return origin is not None and urlsplit(origin).netloc not in hosts
    except ValueError:
        return True


def sent_unasked(content_type: str) -> bool:
    """Whether browsers let any page send a body of this type, or without a type, without a CORS preflight."""
    kind = content_type.partition(";")[0].strip().casefold()
    return kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


def is_token(token: str, given: str) -> bool:
    """Whether a token is valid, compared in constant time."""
    return hmac.compare_digest(
        token.encode("utf-8", "surrogateescape"), given.encode("utf-8", "surrogateescape")
    )


def bearer(header: str) -> str:
    """Return the token in an Authorization header; empty if absent."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.casefold() == "bearer" else ""


class PageGuard:
    """ASGI middleware: Host, Origin, the token, and a body that a page sends without asking.

    Args:
        app: Answers everything else.
        names: Names of this server besides its addresses.
        unasked: Whether such bodies are taken: where every call carries a key that no page can know.
        hint: How a user allows a refused name.
        token: The bearer token that every request needs, unless the app asks for one itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: Collection[str],
        *,
        unasked: bool = False,
        hint: str = "",
        token: str = "",
    ) -> None:
        self._app, self._names = app, {name.casefold() for name in names}
        self._unasked, self._hint, self._token = unasked, hint, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            status, why = page_problem(
                scope.get("method", ""),
                Headers(scope=scope),
                self._names,
                unasked=self._unasked,
                hint=self._hint,
                token=self._token,
            )
            if why and scope["type"] == "websocket":  # closed before it is accepted: 403
                return await send({"type": "websocket.close", "code": 1008, "reason": why})
            if why:
                answer = JSONResponse(openai_error(why, status), status)
                return await answer(scope, receive, send)
        return await self._app(scope, receive, send)


def page_problem(
    method: str,
    headers: Mapping[str, str],
    names: Collection[str] | None,
    *,
    unasked: bool = False,
    hint: str = "",
    token: str = "",
) -> tuple[int, str]:
    """Return why a request is refused, and the status; see PageGuard. `headers` do not distinguish case.

    `names`: None for any Host, on a socket that has none of its own.
    """
    host = headers.get("host", "")
    if names is not None and not is_served(host, names):
        return 403, f"No server is called {host!r} here. {hint}".rstrip()
    if is_foreign(headers.get("origin"), (host,)):
        return 403, "Pages of other sites are not answered."
    if token and not is_token(token, bearer(headers.get("authorization", ""))):
        return 401, "Authorization: Bearer TOKEN is needed."
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if (
        method == "POST"
        and has_body
        and not unasked
        and sent_unasked(headers.get("content-type", ""))
    ):
        return 415, "The body must be JSON. Content-Type: application/json"
    return 200, ""


KEPT = 600
"""Seconds that an unused connection stays open: an agent may be at its tools for long between two calls."""
BACKLOG = 2048
"""Connections that may wait to be accepted: every episode of a step may call at once."""
STARTING = 0.002
"""Seconds between two looks at a server that starts."""
GRACE = 5
"""Seconds for the answers that are on their way when a server ends."""


class _Uvicorn(uvicorn.Server):
    """Signals are the command's, and cancelled it closes its connections at once."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        except asyncio.CancelledError:
            self.force_exit = True
            await self.shutdown(sockets)
            raise

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, host: str, port: int, **options: Any) -> AsyncIterator[str]:
    """Yield the address of a server that answers requests. Raises UsageError for a bad address, EnvError.

    `options` are uvicorn's, which serves HTTP alone without them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"Cannot listen on {host}:{port}: {error.strerror}.",
                hint="Take another port; 0 takes a free one.",
            ) from error
        async with answering(app, sock, **options):
            yield f"http://{place_of(host, sock.getsockname()[1])}"


@contextlib.asynccontextmanager
async def answering(app: ASGIApp, sock: socket.socket, **options: Any) -> AsyncIterator[None]:
    """Answer the requests on a socket that has its address. Raises EnvError if the server does not start."""
    config = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        **{"lifespan": "off", "ws": "none", **options},
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEPT,
        timeout_graceful_shutdown=GRACE,
    )
    server = _Uvicorn(config)
    task = asyncio.create_task(server.serve([sock]))
    try:
        while not server.started:
            if (await asyncio.wait({task}, timeout=STARTING))[0]:
                raise EnvError("The server could not be started.") from task.exception()
        yield
    finally:
        server.should_exit = True
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
