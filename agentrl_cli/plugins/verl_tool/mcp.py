"""The tools by the Model Context Protocol: a trajectory for each session, with its state, sandbox and journal.

A trajectory is closed with its session, and at the latest with the server: no later session can name it. Over HTTP a
session is one of the handshake (its id is in a header). Clients of the protocol without sessions, of 2026-07-28, are
answered as by an older server, which they then shake hands with: state needs a session.
"""

from __future__ import annotations

import asyncio
import contextlib
from base64 import b64decode
from collections.abc import AsyncIterator, Collection
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl_cli._version import __version__
from agentrl_cli.agents.gateway.http import PageGuard, listening
from agentrl_cli.errors import AgentRLError, needs_extra
from agentrl_cli.plugins.verl_tool.app import ToolServer
from agentrl_cli.plugins.verl_tool.journal import Journal
from agentrl_cli.plugins.verl_tool.trajectories import Call, Trajectories
from agentrl_cli.types import new_id
from agentrl_cli.types.content import media_type

VERSION = b"mcp-protocol-version"
PREFIX = "mcp-"
"""Begins the ids of sessions' trajectories."""


def mcp_server(tools: ToolServer) -> Any:
    """Return the server of the tools, with their limit of calls. Raises MissingDependency."""
    with needs_extra("--mcp needs mcp.", "mcp"):
        from mcp import types
        from mcp.server import Server
    opened: dict[str, str] = {}
    trajectories = tools.trajectories

    async def list_tools(context: Any, _: Any) -> Any:
        functions = [tool.schema["function"] for tool in trajectories.tools.values()]
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=one["name"],
                    description=one["description"],
                    input_schema={"type": "object", **one.get("parameters", {})},
                )
                for one in functions
            ]
        )

    async def call_tool(context: Any, params: Any) -> Any:
        request = context.request
        session = "stdio" if request is None else request.headers.get("mcp-session-id", "")
        try:
            if session not in opened:
                opened[session] = f"{PREFIX}{new_id()}"
                await trajectories.open(opened[session], {})
                # Every end of a session leaves it. Private to mcp: without it, closed as on stdio, with the server.
                ends = getattr(getattr(context.session, "_connection", None), "exit_stack", None)
                if request is not None and ends is not None:
                    ends.push_async_callback(_close, trajectories, opened, session)
            call = Call(opened[session], new_id(), params.name, params.arguments or {})
            with tools.slots(1):
                result = (await trajectories.call(call))["result"]
        except AgentRLError as error:
            result = {"text": str(error), "error": "failed", "images": []}
        content: list[Any] = [types.TextContent(type="text", text=result["text"])]
        for image in result["images"]:
            kind = media_type(b64decode(image))
            content.append(types.ImageContent(type="image", data=image, mime_type=kind))
        return types.CallToolResult(content=content, is_error=result["error"] is not None)

    return Server(
        "agentrl-tools",
        version=__version__,
        lifespan=partial(_close_others, trajectories.journal),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _close(trajectories: Trajectories, opened: dict[str, str], session: str) -> None:
    await asyncio.shield(trajectories.close(opened.pop(session)))  # its time to end is bounded


@contextlib.asynccontextmanager
async def _close_others(journal: Journal, _: Any) -> AsyncIterator[None]:
    """Close what a killed server has left, and at the end what this one leaves."""
    journal.end_all(PREFIX)
    try:
        yield
    finally:
        journal.end_all(PREFIX)


async def serve_stdio(server: Any) -> None:
    """Answer one client on stdin and stdout, until it leaves."""
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


@contextlib.asynccontextmanager
async def serve_http(
    server: Any, host: str, port: int, token: str, names: Collection[str], idle: float
) -> AsyncIterator[str]:
    """Answer clients of streamable HTTP; yields the address."""
    from mcp.server.transport_security import TransportSecuritySettings

    # PageGuard checks host and origin, and knows --allow-host.
    unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(
        host=host, session_idle_timeout=idle, transport_security=unchecked
    )
    async with server.session_manager.run():
        guard = PageGuard(_Sessions(app), names, token=token)
        async with listening(guard, host, port) as address:
            yield f"{address}/mcp"


class _Sessions:
    """ASGI middleware: the handshake instead of requests without a session."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        version = Headers(scope=scope).get(VERSION.decode(), "")
        if version not in ("", *HANDSHAKE_PROTOCOL_VERSIONS):
            scope = {**scope, "headers": [one for one in scope["headers"] if one[0] != VERSION]}
        return await self._app(scope, receive, send)
