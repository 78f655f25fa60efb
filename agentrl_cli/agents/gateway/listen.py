"""Listening: an ASGI application on an address, in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from agentrl_cli.errors import EnvError, UsageError

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
