"""Reaching an MCP server: its settings, a client, and the list of its tools, each within a time."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TextIO

from agentrl_cli.config.yamlfile import read_as
from agentrl_cli.errors import AgentRLError, ConfigError, EnvError, needs_extra
from agentrl_cli.types.section import Seconds, Text

STDERR_LINES, STDERR_BYTES = 8, 4096
"""What a message repeats of the stderr of a server that died, at most."""
MOST_TOOLS = 2000
"""Tools of one server."""


@dataclass(frozen=True)
class Server:
    """How to reach an MCP server."""

    name: str
    folder: Path
    command: Text = ""
    args: tuple[Text, ...] = ()
    env: Mapping[Text, Text] = field(default_factory=dict)
    cwd: str = "."
    url: str = ""
    auth_token: str = ""
    auth_token_env: str = ""
    headers: Mapping[Text, Text] = field(default_factory=dict)
    session: Literal["shared", "episode"] = "episode"
    timeout: Seconds | None = None
    """Seconds of one call."""
    start_timeout: Seconds = 30.0
    """Maximum seconds to start it and list its tools."""
    tools: tuple[str, ...] | None = None
    prefix: str = ""
    reset: str = ""
    type: Any = None
    """In other projects' files, as is the next: whether there is a command or a url shows it."""
    transport: Any = None

    @classmethod
    def of(cls, where: str, name: str, given: Any, folder: Path) -> Server:
        """Raises ConfigError for unknown keys, or without a command or url."""
        if not isinstance(given, Mapping) or ("command" in given) == ("url" in given):
            raise ConfigError(f"{where}: the MCP server {name} needs either a command or a url.")
        known = [field.name for field in fields(cls)[2:]]
        values = {key: value for key, value in given.items() if value is not None}
        place = f"{where}: the MCP server {name}"
        return read_as(cls, values, place, known, name=name, folder=folder)

    async def client(self, stack: Any, errors: TextIO) -> Any:
        """Return the mcp package's client for it; its resources are put on `stack`, a process writes stderr to
        `errors`.
        """
        with needs_extra("MCP servers need mcp.", "mcp"):
            from mcp import Client, StdioServerParameters, stdio_client
            from mcp.client.streamable_http import streamable_http_client
        if self.command:
            cwd = self.folder / self.cwd
            parameters = StdioServerParameters(
                command=self.command, args=list(self.args), env=dict(self.env), cwd=cwd
            )
            return Client(stdio_client(parameters, errlog=errors))
        import httpx2

        headers = dict(self.headers)
        if token := self.auth_token or os.environ.get(self.auth_token_env, ""):
            headers["Authorization"] = f"Bearer {token}"
        http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30.0, read=300.0))
        await stack.enter_async_context(http)
        return Client(streamable_http_client(self.url, http_client=http))


@asynccontextmanager
async def connect(server: Server) -> AsyncIterator[tuple[Any, TextIO]]:
    """Yield an initialized client, and the stderr of its process. Raises EnvError if it cannot be reached."""
    async with AsyncExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
        try:
            async with asyncio.timeout(server.start_timeout):
                client = await stack.enter_async_context(await server.client(stack, errors))
        except AgentRLError:
            raise
        except Exception as error:
            raise _unreachable(server, "cannot be reached", error, errors) from error
        yield client, errors


def _unreachable(server: Server, what: str, error: Exception, errors: TextIO) -> EnvError:
    """Return the error for a server that did not start or list its tools, in time or at all."""
    why, hint, limit = reason(error), "", server.start_timeout
    if isinstance(error, TimeoutError):
        why = f"it took longer than {limit:g} s"
        hint = f"Give it longer in task.yaml: {server.name}: {{…, start_timeout: {2 * limit:g}}}"
    return EnvError(f"The MCP server {server.name} {what}: {why}{tail(errors)}", hint=hint)


def tail(errors: TextIO) -> str:
    """Return the last lines of a server's stderr, as the end of a message; empty if it wrote nothing."""
    size = os.fstat(errors.fileno()).st_size
    data = os.pread(
        errors.fileno(), STDERR_BYTES, max(0, size - STDERR_BYTES)
    )  # the process writes at the same offset
    lines = data.decode("utf-8", "replace").strip().splitlines()[-STDERR_LINES:]
    return (
        "\nThe last lines of its stderr:\n" + "\n".join(f"  {line}" for line in lines)
        if lines
        else ""
    )


async def list_tools(server: Server) -> tuple[list[Any], list[str]]:
    """Return its tools, and the names of those that it declares for its reset. Raises EnvError."""
    until = asyncio.get_running_loop().time() + server.start_timeout
    async with connect(server) as (client, errors):
        try:
            async with asyncio.timeout_at(until):
                return await _every_page(client), reset_tools(client.server_capabilities)
        except Exception as error:  # noqa: BLE001 - raised below, in words
            failed = _unreachable(server, "lists no tools", error, errors)
    raise failed  # the client's task groups would make a group of it


async def _every_page(client: Any) -> list[Any]:
    """Return the tools of all pages. Raises OverflowError for a server that always has a next one."""
    page = await client.list_tools()
    found = list(page.tools)
    while page.next_cursor:
        if len(found) > MOST_TOOLS:
            raise OverflowError(f"it has more than {MOST_TOOLS}")
        page = await client.list_tools(cursor=page.next_cursor)
        found += page.tools
    return found


def reset_tools(capabilities: Any) -> list[str]:
    """Return the tools that a server declares for its reset."""
    named = {**(capabilities.experimental or {}), **(capabilities.extensions or {})}
    found = [value for name, value in named.items() if name.rpartition("/")[2] == "reset"]
    return [str(one["tool"]) for one in found if isinstance(one, Mapping) and "tool" in one]


def reason(error: BaseException) -> str:
    """Return the first real error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
