"""Listening: an ASGI application on an address, and the checks before it answers: host, origin and token.

Any web page can send requests to this machine, and one that maps its own name to this address (DNS rebinding) can
read the answers. Neither can choose the Host and Origin headers that a browser sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Collection, Iterator
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl_cli.agents.gateway.dialects.base import openai_error
from agentrl_cli.errors import EnvError, UsageError


def is_loopback(host: str) -> bool:
    """Whether a host is localhost, or an address that never leaves this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
    """ASGI middleware: Host, Origin, and a body that a page sends without asking.

    Args:
        app: Answers everything else.
        names: Names of this server besides its addresses.
        unasked: Whether such bodies are taken: where every call carries a key that no page can know.
        hint: How a user allows a refused name.
    """

    def __init__(
        self, app: ASGIApp, names: Collection[str], *, unasked: bool = False, hint: str = ""
    ) -> None:
        self._app, self._names = app, {name.casefold() for name in names}
        self._unasked, self._hint = unasked, hint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            status, why = self._problem(scope["method"], Headers(scope=scope))
            if why:
                await JSONResponse(openai_error(why, status), status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, method: str, headers: Headers) -> tuple[int, str]:
        """Return the status and sentence of a refusal; an empty sentence for none."""
        host = headers.get("host", "")
        if not is_served(host, self._names):
            return 403, f"No server is called {host!r} here. {self._hint}".rstrip()
        if is_foreign(headers.get("origin"), (host,)):
            return 403, "Pages of other sites are not answered."
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if (
            method == "POST"
            and has_body
            and not self._unasked
            and sent_unasked(headers.get("content-type", ""))
        ):
            return 415, "The body must be JSON. Content-Type: application/json"
        return 200, ""


KEPT = 600
"""Seconds that an unused connection stays open: an agent may be at its tools for long between two calls."""
BACKLOG = 2048
"""Connections that may wait to be accepted: every episode of a step may call at once."""
GRACE = 5
"""Seconds for the answers that are on their way when a server ends."""


class _Uvicorn(uvicorn.Server):
    """Signals are the command's, its start is an event, and cancelled it closes its connections at once."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()

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
async def listening(app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """Yield the address of a server that answers requests. Raises UsageError for a bad address, EnvError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"Cannot listen on {host}:{port}: {error.strerror}.", hint="Take another --port."
            ) from error
        async with answering(app, sock):
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{sock.getsockname()[1]}"


@contextlib.asynccontextmanager
async def answering(app: ASGIApp, sock: socket.socket) -> AsyncIterator[None]:
    """Answer the requests on a socket that has its address. Raises EnvError if the server does not start."""
    config = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEPT,
        timeout_graceful_shutdown=GRACE,
    )
    server = _Uvicorn(config)
    task = asyncio.create_task(server.serve([sock]))
    starting = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait({task, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not server.ready.is_set():
            raise EnvError("The server could not be started.") from task.exception()
        yield
    finally:
        starting.cancel()
        server.should_exit = True
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
