"""Listening: an ASGI application on an address, in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from agentrl_cli.errors import UsageError

KEPT = 600
"""Seconds that an unused connection stays open: an agent may be at its tools for long between two calls."""


class _Uvicorn(uvicorn.Server):
    """Signals are the command's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """Answer requests; yields the address. Raises UsageError if it cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"Cannot listen on {host}:{port}: {error.strerror}.", hint="Take another --port."
            ) from error
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEPT,
            timeout_graceful_shutdown=5,
        )
        server = _Uvicorn(config)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        try:
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
