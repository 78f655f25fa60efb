"""Keeps web pages out of a server, token or not."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl_cli.agents.gateway.dialects.base import openai_error
from agentrl_cli.agents.gateway.guard import is_foreign, is_served, sent_unasked


class PageGuard:
    """ASGI middleware: Host, Origin, and a body that a page sends without asking.

    Args:
        app: What answers everything else.
        names: Names of this server besides its addresses.
        unasked: Whether such bodies are taken: where every call carries a key that no page can know.
        hint: What a user does about a name that is refused.
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
        """Status and sentence of a refusal; an empty sentence for none."""
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
