"""textual-serve behind a token, on the loopback address.

The token comes once in the address and is then kept in a same-site cookie; every request, the websocket too, must carry
it. Requests for another host name are refused, which stops DNS rebinding.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from agentrl_cli.agents.gateway.http import is_foreign, is_loopback, is_token, place_of
from agentrl_cli.errors import UsageError, needs_extra

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


def make_guard(token: str, hosts: Collection[str]) -> Any:
    """Return the aiohttp middleware that checks host, origin and token of every request."""
    from aiohttp import web

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Any:
        if request.host not in hosts or is_foreign(request.headers.get("Origin"), hosts):
            raise web.HTTPForbidden(text="This host name is not served here.")
        cookie = f"{COOKIE}-{request.host.rpartition(':')[2]}"  # a host's ports share its cookies
        said = request.query.get("token")
        if said is not None and is_token(token, said):
            response = web.Response(status=302, headers={"Location": "/"})
            response.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            return response
        if not is_token(token, request.cookies.get(cookie, "")):
            raise web.HTTPForbidden(
                text="Open the address that `agentrl screens` printed: it contains the token."
            )
        answer = await handler(request)
        if isinstance(answer, web.Response) and answer.content_type == "text/html" and answer.text:
            answer.text = FOREIGN.sub("", answer.text).replace("</head>", FOCUS, 1)
        return answer

    return guard


def make_server(command: str, host: str, port: int, token: str) -> Any:
    """Return a textual-serve server for a command line, in which every request passes the guard.

    Raises MissingDependency, and UsageError off the loopback address.
    """
    if not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines; the screens are served on this machine only.",
            hint=f"From elsewhere: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then open the address there.",
        )
    with needs_extra("Screens in a browser need textual-serve.", "serve"):
        from aiohttp import web
        from textual_serve.server import Server
    place = place_of(host, port)
    hosts = {place, f"localhost:{port}", f"127.0.0.1:{port}"}

    class Guarded(Server):
        """A textual-serve server that logs no requests, since their addresses contain the token."""

        address = f"http://{place}"

        async def _make_app(self) -> web.Application:
            app = await super()._make_app()
            app.middlewares.append(make_guard(token, hosts))
            return app

        def initialize_logging(self) -> None:
            """Log nothing."""

        async def on_startup(self, app: web.Application) -> None:
            """Print nothing: `serve` reports when the port is open."""

    return Guarded(command, host=host, port=port, title="agentrl", public_url=f"http://{place}")


def serve(server: Any, listening: Callable[[], None]) -> None:
    """Serve until ctrl+c, as textual-serve does, but call `listening` once connections are accepted.

    Raises UsageError if the port is taken or not allowed.
    """
    from aiohttp import web

    loop = asyncio.new_event_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.request_exit)
    options = {"host": server.host, "port": server.port, "handle_signals": False}
    try:
        web.run_app(server._make_app(), **options, loop=loop, print=lambda *_: listening())
    except OSError as error:
        raise UsageError(
            f"Nothing can be served on port {server.port}: {error.strerror}.",
            hint="--port chooses another one; those below 1024 are often the administrator's alone.",
        ) from error
