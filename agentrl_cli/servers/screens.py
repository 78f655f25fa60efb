"""The screens in a browser: textual-serve behind a token, on the loopback address.

Anyone with the token can do what the screens do: read the store, control a training, run tools. The token comes once
in the address and is then kept in a same-site cookie; every request, the websocket too, must carry it. Requests for
another host name are refused, which stops DNS rebinding.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentrl_cli.agents.gateway.guard import allowed, is_foreign, is_loopback
from agentrl_cli.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from aiohttp import web

COOKIE = "agentrl"

FOREIGN = re.compile(r"<link[^>]*https://fonts\.[^>]*>")
"""The external font that textual-serve's page requests; the browser's own is used instead."""

FOCUS = """<script>
new MutationObserver((_, seen) => {
  const keys = document.querySelector(".-first-byte .xterm-helper-textarea");
  if (keys) { keys.focus(); seen.disconnect(); }
}).observe(document, {attributes: true, subtree: true, attributeFilter: ["class"]});
</script>
</head>"""
"""Keys reach the screen at once: textual-serve's page waits for a click on the terminal."""

PATIENCE = 3.0
"""Seconds a screen gets to exit by itself after its browser disconnects."""


def address(host: str, port: int) -> str:
    """Host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def make_guard(token: str, hosts: Collection[str]) -> Any:
    """Return the aiohttp middleware that checks host, origin and token of every request."""
    from aiohttp import web

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Any:
        if request.host not in hosts or is_foreign(request.headers.get("Origin"), hosts):
            raise web.HTTPForbidden(text="This host name is not served here.")
        said = request.query.get("token")
        if said is not None and allowed(token, said):
            response = web.Response(status=302, headers={"Location": "/"})
            response.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
            return response
        if not allowed(token, request.cookies.get(COOKIE, "")):
            raise web.HTTPForbidden(
                text="Open the address that `agentrl screens` printed: it contains the token."
            )
        answer = await handler(request)
        if isinstance(answer, web.Response) and answer.content_type == "text/html" and answer.text:
            answer.text = FOREIGN.sub("", answer.text).replace("</head>", FOCUS, 1)
        return answer

    return guard


async def end(screen: Any) -> None:
    """Stops the process of a textual-serve AppService: terminates it, then kills it; closes its pipes."""
    process: asyncio.subprocess.Process | None = screen._process
    if process is None:
        return
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(screen.stop(), PATIENCE)
            await asyncio.wait_for(process.wait(), PATIENCE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        # asyncio closes a pipe only at end of file, and this one is not read any more.
        getattr(process, "_transport").close()  # noqa: B009 - private, but the only handle


def size(request: Any, name: str, default: int) -> int:
    """Columns or lines that a browser requests, clamped to a screen's limits; `default` if absent."""
    said = request.query.get(name, "")
    return min(max(int(said), 10), 1000) if said.isascii() and said.isdigit() else default


async def serve_screen(server: Any, request: web.Request) -> web.WebSocketResponse:
    """One browser's screen over its websocket; stops the process with it, which textual-serve does not ensure."""
    from aiohttp import web
    from textual_serve.app_service import AppService

    socket = web.WebSocketResponse(heartbeat=15)
    await socket.prepare(request)

    async def close() -> None:
        await socket.close()

    screen = AppService(
        server.command,
        write_bytes=socket.send_bytes,
        write_str=socket.send_str,
        close=close,
        download_manager=server.download_manager,
    )
    try:
        await screen.start(size(request, "width", 80), size(request, "height", 24))
        await server._process_messages(socket, screen)
    finally:
        await end(screen)
    return socket


def serve(server: Any, listening: Callable[[], None]) -> None:
    """Serves until ctrl+c, like textual-serve, but calls `listening` once connections are accepted."""
    from aiohttp import web

    loop = asyncio.new_event_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, server.request_exit)
    place = {"host": server.host, "port": server.port}
    web.run_app(
        server._make_app(), **place, handle_signals=False, loop=loop, print=lambda *_: listening()
    )


def make_server(
    command: str, host: str, port: int, token: str, public_url: str | None = None
) -> Any:
    """Return a textual-serve server for a command line. Raises MissingDependency, and UsageError off the loopback
    address.
    """
    if not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines; the screens are served on this machine only.",
            hint=f"From elsewhere: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then open the address there.",
        )
    try:
        from textual_serve.server import Server
    except ImportError as error:
        raise MissingDependency(
            "Screens in a browser need textual-serve.", hint="pip install 'agentrl-cli[serve]'"
        ) from error

    place = address(host, port)
    base = public_url or f"http://{place}"
    hosts = {place, f"localhost:{port}", f"127.0.0.1:{port}", urlsplit(base).netloc}

    guard = make_guard(token, hosts)

    class Guarded(Server):
        """A textual-serve server in which every request passes the guard."""

        async def _make_app(self) -> web.Application:
            app = await super()._make_app()
            app.middlewares.append(guard)
            return app

        running = 0
        """Screens currently open in browsers, each with its process."""

        async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
            self.running += 1
            try:
                return await serve_screen(self, request)
            finally:
                self.running -= 1

        def initialize_logging(self) -> None:
            """Logs no requests: their addresses contain the token."""

        async def on_startup(self, app: web.Application) -> None:
            """Does nothing: `serve` reports when the port is open."""

    return Guarded(command, host=host, port=port, title="agentrl", public_url=base)
