"""Tools of MCP servers, over stdio and streamable HTTP, through the official `mcp` package.

    - mcp:
        time: {command: python, args: [server.py], env: {TZ: UTC}, tools: [now], prefix: time_}
        web: {url: "http://127.0.0.1:8000/mcp", auth_token_env: WEB_TOKEN, session: shared}

A server's tools are listed when the pack is loaded; `tools` chooses some, `prefix` stands before their names. Each
episode has its own connection, so that no state of one reaches another; servers without state may be shared by all
episodes (`session: shared`). A connection is closed after its last use, unless the server can be reset: `reset` names
the tool that does so, or the server declares it, as an extension `VENDOR/reset` with the setting `{"tool": NAME}` or,
in protocols before 2026, as the experimental capability `{"reset": {"tool": NAME}}`. Then a server serves one episode
after the other, and its reset tool is not offered.
A call that takes too long is cancelled at the server, and its observation has the last progress that was reported.
A lost server is an EnvError with the last lines of its stderr; an error that it returns is an observation. MCP tools
count as `external`. `agentrl init --from mcp:COMMAND` writes such an entry.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from agentrl_cli.errors import ConfigError, EnvError, NotFound, UsageError
from agentrl_cli.plugins.mcp_client.server import Server, connect, list_tools, reason, tail
from agentrl_cli.tools.base import Tool, ToolContext
from agentrl_cli.types import ToolResult

if TYPE_CHECKING:
    from agentrl_cli.commands.init.draft import Draft

IDLE = 60.0
"""Seconds after which a server that waits for its next episode is stopped."""


class Connection:
    """One client, opened and closed in its own task: the package's scopes must be exited where they were entered."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.users = 0
        self.broken = False
        """True once a call found the server unreachable: the next episode opens a new connection."""
        self.until: asyncio.TimerHandle | None = None
        """Closes it while it waits for its next episode."""
        self.closing: asyncio.Task[None] | None = None
        self._errors: TextIO | None = None
        self._reset: asyncio.Task[None] | None = None
        self._start()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._enough = asyncio.Event()
        self._client: asyncio.Future[Any] = loop.create_future()
        self._task = loop.create_task(self._hold(), name=f"mcp-{self.server.name}")

    def begin(self, tool: str) -> None:
        """Serve the next episode: its calls wait until the server was reset by `tool`, or started again."""
        self._reset = asyncio.create_task(self._renew(tool))

    async def _renew(self, tool: str) -> None:
        try:
            async with asyncio.timeout(self.server.start_timeout):
                failed = (await (await asyncio.shield(self._client)).call_tool(tool, {})).is_error
        except Exception:  # noqa: BLE001 - whatever the reason, a new server is as good
            failed = True
        if failed:
            await self.close()
            self._start()

    async def _hold(self) -> None:
        try:
            async with connect(self.server) as (client, errors):
                self._errors = errors
                self._client.set_result(client)
                await self._enough.wait()
        except Exception as error:  # noqa: BLE001 - passed to the tasks that await the client
            if not self._client.done():
                self._client.set_exception(error)

    async def client(self) -> Any:
        """Return the client, once connected. Raises EnvError."""
        if self._reset is not None:
            await asyncio.shield(self._reset)
        return await asyncio.shield(self._client)

    def explain_loss(self, why: str) -> EnvError:
        """Return the error for a server that has ended; the next episode opens a new connection."""
        self.broken = True
        quoted = tail(self._errors) if self._errors is not None and not self._errors.closed else ""
        return EnvError(f"The MCP server {self.server.name} was lost: {why}{quoted}")

    async def close(self) -> None:
        """Close the connection; a server process that it started is stopped."""
        self._enough.set()
        await asyncio.wait([self._task])
        if self._client.done() and not self._client.cancelled():
            self._client.exception()  # marks the exception as retrieved


@dataclass
class Link:
    """A server and its open connections."""

    server: Server
    reset: str = ""
    """The tool that makes the server as new; empty without one."""
    _shared: dict[asyncio.AbstractEventLoop, Connection] = field(default_factory=dict)
    _idle: dict[asyncio.AbstractEventLoop, list[Connection]] = field(default_factory=dict)

    @property
    def shared(self) -> bool:
        return self.server.session == "shared"

    async def take(self, ctx: ToolContext) -> Connection:
        """Return the connection of an episode, shared by the server's tools."""
        # Entries that choose tools of one server share its connection; the same name may be another server's.
        key = f"mcp:{replace(self.server, tools=None, prefix='')}"
        found: Connection | None = ctx.state.get(key)
        if found is not None and not found.users:  # given back: it is closed, or another episode's
            del ctx.state[key]
            found = None
        if found is None and self.shared:
            found = self._shared.get(asyncio.get_running_loop())
        if found is None and (idle := self._idle.get(asyncio.get_running_loop())):
            found = idle.pop()
            if found.until is not None:
                found.until.cancel()
            found.begin(self.reset)
        if found is None or (found.broken and key not in ctx.state):
            found = Connection(self.server)
            if self.shared:
                self._shared[asyncio.get_running_loop()] = found
        ctx.state[key] = found
        found.users += 1
        return found

    async def give_back(self, connection: Connection) -> None:
        """Releases a connection; the last user closes it."""
        connection.users -= 1
        if connection.users == 0:
            loop = asyncio.get_running_loop()
            if self.reset and not self.shared and not connection.broken:
                self._keep(loop, connection)
                return
            if self._shared.get(loop) is connection:
                del self._shared[loop]
            await connection.close()

    def _keep(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        """Let the server wait for another episode, for a while."""
        idle = self._idle.setdefault(loop, [])
        idle.append(connection)

        def stop() -> None:
            idle.remove(connection)
            connection.closing = loop.create_task(connection.close())

        connection.until = loop.call_later(IDLE, stop)


class McpTool(Tool):
    """A tool of an MCP server."""

    external = True

    def __init__(self, link: Link, listed: Any) -> None:
        self.link = link
        self.remote = listed.name
        self.name = f"{link.server.prefix}{listed.name}"
        self.timeout = link.server.timeout
        own = {key: value for key, value in listed.input_schema.items() if key != "title"}
        function = {
            "name": self.name,
            "description": listed.description or "",
            "parameters": {"type": "object", "properties": {}} | own,
        }
        self.schema = {"type": "function", "function": function}

    async def create(self, ctx: ToolContext) -> Connection:
        connection = await self.link.take(ctx)
        try:
            await connection.client()
        except BaseException:
            await self.link.give_back(connection)
            raise
        return connection

    async def call(
        self, state: Connection, arguments: dict[str, Any], *, timeout: float | None = None
    ) -> ToolResult:
        reported: list[str] = []
        token = _PROGRESS.set(reported)
        try:
            result = await super().call(state, arguments, timeout=timeout)
        finally:
            _PROGRESS.reset(token)
        if result.error == "timeout" and reported:
            return replace(result, text=f"{result.text} Its last progress: {reported[-1]}")
        return result

    async def execute(self, state: Connection, arguments: dict[str, Any]) -> ToolResult:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = await state.client()
        try:
            answer = await client.call_tool(
                self.remote, arguments, progress_callback=partial(_progress, _PROGRESS.get())
            )
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise state.explain_loss(str(error)) from error
            return ToolResult(f"Error: {error}", error="exception")
        except (OSError, RuntimeError) as error:
            raise state.explain_loss(reason(error)) from error
        return _result(answer)

    async def release(self, state: Connection) -> None:
        await self.link.give_back(state)


def mcp_tools(where: str, name: str, given: Any, folder: Path) -> list[Tool]:
    """Connects to a server and lists its tools. Raises ConfigError, EnvError, MissingDependency."""
    server = Server.of(where, name, given, folder)
    with ThreadPoolExecutor(1) as pool:  # the caller may be inside a running loop
        listed, declared = pool.submit(asyncio.run, list_tools(server)).result()
    known = {item.name: item for item in listed}
    reset = server.reset or next(iter(declared), "")
    for wanted in (*(server.tools or ()), *filter(None, [reset])):
        if wanted not in known:
            unknown = NotFound.of(f"tool of the MCP server {name}", wanted, known)
            raise ConfigError(f"{where}: {unknown.message}", hint=unknown.hint)
    chosen = [one for one in known if one != reset] if server.tools is None else server.tools
    link = Link(server, reset)
    return [McpTool(link, known[one]) for one in chosen]


async def _progress(
    reported: list[str], progress: float, total: float | None, message: str | None
) -> None:
    reported.append(
        f"{progress:g}{'' if total is None else f' of {total:g}'}{f', {message}' if message else ''}"
    )


_PROGRESS: ContextVar[list[str]] = ContextVar("agentrl_mcp_progress")
"""What the running call reported."""


def _result(answer: Any) -> ToolResult:
    """Return the texts of an answer, concatenated, resources with their URIs, and its images."""
    texts: list[str] = []
    images: list[bytes] = []
    for block in answer.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "image":
            images.append(base64.b64decode(block.data))
        elif block.type == "resource":
            text = getattr(block.resource, "text", None)
            texts.append(f"[resource {block.resource.uri}]" + ("" if text is None else f"\n{text}"))
        elif block.type == "resource_link":
            about = " — ".join(filter(None, (block.name, block.description)))
            texts.append(f"[resource_link {block.uri}] {about}".rstrip())
        else:
            texts.append(f"[{block.type}]")
    if not answer.content and answer.structured_content is not None:
        texts = [json.dumps(answer.structured_content, ensure_ascii=False)]
    return ToolResult(
        "\n".join(texts), error="exception" if answer.is_error else None, images=tuple(images)
    )


def configured_tools(where: str, entry: Mapping[str, Any] | None, folder: Path) -> list[Tool]:
    """Return the tools of MCP servers by name, or from a server file with a selection of their tools."""
    given = dict(entry or {})
    selected = given.pop("tool_selected_list", None)
    path = given.pop("mcp_servers_config_path", None)
    if path is not None:
        file = folder / str(path)
        try:
            given |= json.loads(file.read_text(encoding="utf-8")).get("mcpServers") or {}
        except FileNotFoundError:
            raise ConfigError(f"{where}: {file} does not exist.") from None
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{file} is not JSON with `mcpServers`: {error}") from error
    if not given:
        raise ConfigError(f"{where}: no MCP server is named.")
    tools: list[Tool] = []
    for name, server in given.items():
        tools += mcp_tools(where, str(name), server, folder)
    if selected is not None:
        known = {tool.name for tool in tools}
        missing = sorted(set(selected) - known)
        if missing:
            raise ConfigError(
                f"{where}: the servers have no {', '.join(missing)}.",
                hint=f"They have {', '.join(sorted(known))}.",
            )
    return [tool for tool in tools if selected is None or tool.name in selected]


def add(draft: Draft, target: str) -> None:
    """Add the tools of a server, named by its address or command, to a new pack.

    Files among its arguments become absolute paths.
    """
    server: dict[str, Any] = {"url": target}
    if not target.startswith(("http://", "https://")):
        hint = '--from "mcp:python server.py", or mcp:http://host/mcp'
        try:
            words = shlex.split(target)
        except ValueError as error:
            raise UsageError(f"{target} is not a command: {error}.", hint=hint) from error
        if not words:
            raise UsageError("No MCP server is named.", hint=hint)
        placed = [str(Path(word).resolve()) if Path(word).is_file() else word for word in words[1:]]
        server = {"command": words[0], "args": placed}
    tools = mcp_tools("--from", "server", server, Path.cwd())
    draft.tools.append({"mcp": {"server": server}})
    draft.names += [tool.name for tool in tools]
