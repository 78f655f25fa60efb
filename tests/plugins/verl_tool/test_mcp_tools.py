"""A pack's tools by MCP, with the official client: state per session, over stdio and streamable HTTP."""

import asyncio
import contextlib
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.parsers import load_parser
from agentrl_cli.commands import main
from agentrl_cli.plugins.verl_tool.app import ToolServer
from agentrl_cli.plugins.verl_tool.journal import Journal
from agentrl_cli.plugins.verl_tool.mcp import mcp_server, serve_http
from agentrl_cli.tools import as_tool
from agentrl_cli.types import ToolResult
from tests.helpers.processes import soon
from tests.plugins.verl_tool.test_server import Tally, bumped, world

TOTAL = '''
def add(by: int, ctx: ToolContext) -> str:
    """Add to the total.

    Args:
        by: How much.
    """
    print("noise on stdout")
    ctx.state["total"] = ctx.state.get("total", 0) + by
    return str(ctx.state["total"])
'''


def shot() -> ToolResult:
    """Show a JPEG."""
    return ToolResult("", images=(b"\xff\xd8\xff\xe0",))


def left(path: Path) -> list[int]:
    """Numbers of trajectories that are open in a journal, and of calls."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        queries = ("trajectories WHERE closed IS NULL", "calls")
        return [db.execute(f"SELECT count(*) FROM {one}").fetchone()[0] for one in queries]


async def test_a_state_for_each_session_over_http(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp")
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    headers, path = {"Authorization": "Bearer secret"}, tmp_path / "j.db"
    with contextlib.closing(Journal(path)) as journal:
        for name in ("mcp-killed", "other"):  # of a server that was killed, and of another protocol
            journal.open(name, {})
            journal.begin(name, "k", "bump", {"by": 1})
    async with world(path, [Tally().tool, as_tool(shot)]) as trajectories:
        limited = ToolServer(trajectories, load_parser("hermes"), token="")
        names = {"tools.example"}
        async with serve_http(
            mcp_server(limited), "127.0.0.1", 0, "secret", names, 60.0
        ) as address:

            @contextlib.asynccontextmanager
            async def client(**more: str) -> Any:
                async with (
                    httpx2.AsyncClient(headers=headers | more, timeout=None) as http,
                    mcp.Client(streamable_http_client(address, http_client=http)) as found,
                ):
                    yield found

            async def session(by: int) -> list[str]:
                async with client() as one:
                    return [await bumped(one, by) for _ in range(3)]

            said = await asyncio.gather(*map(session, range(1, 9)))
            assert said == [[str(by * times) for times in (1, 2, 3)] for by in range(1, 9)]
            await soon(lambda: not len(trajectories) and left(path) == [1, 1])
            async with client() as one:
                assert [tool.name for tool in (await one.list_tools()).tools] == ["bump", "shot"]
                wrong = await one.call_tool("bump", {"by": "much"})
                assert wrong.is_error and "by" in wrong.content[0].text
                assert (await one.call_tool("other", {})).is_error
                assert await bumped(one, 2) == "2"
            async with client(Host="tools.example:8443") as one:  # as --allow-host allows
                shown = (await one.call_tool("shot", {})).content[1]
                assert (shown.mime_type, shown.data[:4]) == ("image/jpeg", "/9j/")
                limited.limit = 0
                full = await one.call_tool("bump", {"by": 1})
                assert full.is_error and "the limit is 0" in full.content[0].text
                await soon(lambda: left(path) == [2, 2])  # its own, and the other protocol's
            async with httpx2.AsyncClient(timeout=None) as http:
                assert (await http.post(address, json={})).status_code == 401
                origin = {**headers, "Origin": "http://evil.example"}
                assert (await http.post(address, json={}, headers=origin)).status_code == 403
        assert trajectories.journal.is_known("other")
    assert left(path) == [1, 1]


async def test_the_command_on_stdin_and_stdout(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp")
    (tmp_path / "tool.py").write_text("from agentrl_cli.tools import ToolContext\n" + TOTAL)
    with contextlib.chdir(tmp_path):
        assert main(["init", "shop", "--from", "tool.py"]) == 0
    words = "-m agentrl_cli tools serve --mcp --stdio --project shop".split()
    words += "--set sandbox.backend=bare --set sandbox.min_level=bare".split()
    parameters = mcp.StdioServerParameters(command=sys.executable, args=words, cwd=tmp_path)
    said = tmp_path / "said"
    with said.open("w") as log:
        async with mcp.Client(mcp.stdio_client(parameters, errlog=log)) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            assert {"add", "calculator"} <= names
            for total in ("2", "4"):
                found = await client.call_tool("add", {"by": 2})
                assert found.content[0].text == total
    assert "WARNING" in said.read_text()
    assert await soon(lambda: left(tmp_path / "shop" / "runs" / "tool-server.db") == [0, 0])
