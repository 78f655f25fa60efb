"""MCP servers over stdio and streamable HTTP: a small server written with the same package."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ConfigError, EnvError
from agentrl_cli.tools import Tool, ToolContext
from agentrl_cli.tools.configured import load_tools
from agentrl_cli.tools.mcp import Connection, mcp_tools
from agentrl_cli.tools.mcp_server import reset_tools
from tests.helpers.processes import comes

pytest.importorskip("mcp")

SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.extension import Extension
from mcp_types import EmbeddedResource, ResourceLink, TextResourceContents

class Reset(Extension):
    identifier = "org.example/reset"

    def settings(self):
        return {"tool": "restart"}

server = MCPServer("small", extensions=[Reset()] if "declare" in sys.argv else [])
count = restarts = 0

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
def step() -> str:
    """Count the calls of this server."""
    global count
    count += 1
    return f"{count} {os.environ.get('MOOD', '')}"

@server.tool()
def restart() -> str:
    """Begin again at 0; twice at most."""
    global count, restarts
    restarts += 1
    if restarts > 2:
        raise ValueError("worn out")
    count = 0
    return "ready"

@server.tool()
async def crawl(ctx: Context) -> str:
    """Take long, and notice if it is cancelled."""
    try:
        await ctx.report_progress(1, 3, "one of three")
        await asyncio.sleep(30)
    except BaseException:
        global count
        count = 100
        raise

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")

@server.tool()
def leave() -> str:
    """Stop the server."""
    os._exit(3)

@server.tool(structured_output=False)
def look():
    """Answer a resource and a link."""
    text = TextResourceContents(uri="memo://1", text="It rains.")
    link = ResourceLink(type="resource_link", uri="memo://2", name="two", description="The next.")
    return [EmbeddedResource(type="resource", resource=text), link]

if __name__ == "__main__":
    with open("starts", "a") as starts:
        starts.write("x")
    if "die" in sys.argv:
        print("no licence found", file=sys.stderr)
        sys.exit(4)
    if sys.argv[-1].isdigit():
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path


def stdio(**more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["server.py"], **more}


def by_name(tools: list[Tool]) -> dict[str, Tool]:
    return {tool.name: tool for tool in tools}


async def test_a_server_over_stdio(folder: Path) -> None:
    """Calls, errors, a server for each episode, a long call that is cancelled with its progress, a loss."""
    tools = by_name(mcp_tools("here", "small", stdio(env={"MOOD": "good"}), folder))
    assert list(tools) == [*"add step restart crawl fail leave look".split()] and all(
        tool.external for tool in tools.values()
    )
    assert tools["add"].schema["function"]["description"] == "Add two numbers."
    assert tools["add"].schema["function"]["parameters"]["required"] == ["a", "b"]
    context = ToolContext()
    states = {name: await tool.create(context) for name, tool in tools.items()}
    assert len(set(map(id, states.values()))) == 1  # the tools of a server share its connection
    answers = [tools["add"].call(states["add"], {"a": n, "b": 1}) for n in range(4)]
    assert [result.text for result in await asyncio.gather(*answers)] == ["1", "2", "3", "4"]
    assert (await tools["step"].call(states["step"], {})).text == "1 good"
    failed = await tools["fail"].call(states["fail"], {})
    assert failed.error == "exception" and "fail" in failed.text
    assert (await tools["add"].call(states["add"], {"a": "x"})).error == "bad_arguments"
    other = await tools["step"].create(ToolContext())
    assert (await tools["step"].call(other, {})).text == "1 good", (
        "another episode has a server of its own"
    )
    await tools["step"].release(other)
    late = await tools["crawl"].call(states["crawl"], {}, timeout=1.5)
    assert late.error == "timeout" and late.text.endswith("Its last progress: 1 of 3, one of three")
    assert (await tools["step"].call(states["step"], {})).text == "101 good", "the server noticed"
    with pytest.raises(EnvError, match="was lost"):
        await tools["leave"].call(states["leave"], {})
    again = await tools["add"].create(ToolContext())  # the next episode finds the server back
    assert (await tools["add"].call(again, {"a": 1, "b": 1})).text == "2"
    await tools["add"].release(again)
    for name, tool in tools.items():
        await tool.release(states[name])


async def test_episodes_share_a_server_that_is_shared(folder: Path) -> None:
    tool = by_name(mcp_tools("here", "small", stdio(session="shared"), folder))["step"]
    states = [await tool.create(ToolContext()) for _ in range(2)]
    assert [(await tool.call(state, {})).text for state in states] == ["1 ", "2 "]
    for state in states:
        await tool.release(state)


async def test_a_server_is_started_once_and_reset_as_it_declares(folder: Path) -> None:
    """A reset that fails starts another server; a lost one is not used again; the tool is not offered."""
    from mcp_types import ServerCapabilities

    given = stdio(env={"MOOD": "x"})
    before = ServerCapabilities(experimental={"reset": {"tool": "restart"}})
    assert reset_tools(before) == ["restart"] and reset_tools(ServerCapabilities()) == []
    assert "restart" not in by_name(
        mcp_tools("here", "small", given | {"reset": "restart"}, folder)
    )
    (folder / "starts").unlink()
    tools = by_name(mcp_tools("here", "small", given | {"args": ["server.py", "declare"]}, folder))
    assert "restart" not in tools
    seen = []
    for episode in range(5):
        ctx = ToolContext()
        state = await tools["step"].create(ctx)
        other = await tools["leave"].create(ctx)
        seen.append((id(state), (await tools["step"].call(state, {})).text))
        if episode == 3:
            with pytest.raises(EnvError, match="was lost"):
                await tools["leave"].call(other, {})
        await tools["step"].release(state)
        await tools["leave"].release(other)
    assert [text for _, text in seen] == ["1 x"] * 5
    assert len({place for place, _ in seen[:4]}) == 1, "one connection, whose third reset failed"
    link: Any = tools["step"]
    idle: list[Connection] = [one for waiting in link.link._idle.values() for one in waiting]
    assert len(idle) == 1 and idle[0].until is not None
    assert len((folder / "starts").read_text()) == 4, (
        "to list its tools, for the first, after a failed reset, and lost"
    )
    await idle[0].close()
    with pytest.raises(ConfigError, match="nowhere"):
        mcp_tools("here", "small", stdio(reset="nowhere"), folder)


async def test_chosen_tools_under_a_prefix_and_resources(folder: Path) -> None:
    given = {
        "a": stdio(tools=["look"], prefix="a_", session="episode"),
        "b": stdio(tools=["look", "add"]),
    }
    tools = by_name(load_tools([{"mcp": given}], folder))
    assert (
        list(tools) == ["a_look", "look", "add"]
        and tools["a_look"].schema["function"]["name"] == "a_look"
    )
    state = await tools["a_look"].create(ToolContext())
    answer = await tools["a_look"].call(state, {})
    assert answer.text == "[resource memo://1]\nIt rains.\n[resource_link memo://2] two — The next."
    await tools["a_look"].release(state)
    with pytest.raises(ConfigError, match="'ad'") as caught:
        mcp_tools("here", "small", stdio(tools=["ad"]), folder)
    assert "add" in (caught.value.hint or "")


def test_a_server_that_dies_is_quoted(folder: Path) -> None:
    with pytest.raises(EnvError, match=r"last lines of its stderr:\n  no licence found"):
        mcp_tools(
            "here", "small", {"command": sys.executable, "args": ["server.py", "die"]}, folder
        )


async def test_a_file_of_servers_with_a_selection(folder: Path) -> None:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"small": stdio()}}))
    entry = {
        "config": {"type": "mcp"},
        "mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["add"]},
    }
    assert [tool.name for tool in load_tools([entry], folder)] == ["add"]
    entry["mcp"] = {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["ad"]}
    with pytest.raises(ConfigError, match="the servers have no ad"):
        load_tools([entry], folder)


def test_servers_that_cannot_be_reached(folder: Path) -> None:
    for given in ({"command": "no-such-command"}, {"url": "http://127.0.0.1:9/mcp"}):
        with pytest.raises(EnvError, match="small cannot be reached"):
            mcp_tools("here", "small", {**given, "start_timeout": 5}, folder)


ENDLESS = """
import sys
import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import ListToolsResult, Tool

async def listed(ctx, params):
    at = int((params.cursor if params else None) or 0)
    if "slow" in sys.argv:
        await anyio.sleep_forever()
    tools = [Tool(name=f"t{at + n}", inputSchema={"type": "object"}) for n in range(50)]
    return ListToolsResult(tools=tools, nextCursor=str(at + 50))

server = Server("endless", on_list_tools=listed)

async def main():
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

anyio.run(main)
"""


def test_a_server_is_not_listed_for_ever(folder: Path) -> None:
    (folder / "endless.py").write_text(ENDLESS)
    with pytest.raises(EnvError, match="endless lists no tools: it has more than 2000"):
        mcp_tools("here", "endless", {"command": sys.executable, "args": ["endless.py"]}, folder)
    for args in (["endless.py", "slow"], ["-c", "while True: input()"]):
        given = {"command": sys.executable, "args": args, "start_timeout": 2.5}
        with pytest.raises(
            EnvError, match=r"slow (?:lists no tools|cannot be reached): it took .* 2\.5 s"
        ) as late:
            mcp_tools("here", "slow", given, folder)
        assert "start_timeout: 5}" in late.value.hint


@pytest.fixture
def http(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "server.py", str(port)], cwd=folder, stderr=subprocess.DEVNULL
    )
    try:
        with closing(socket.socket()) as probe:
            assert comes(
                lambda: probe.connect_ex(("127.0.0.1", port)) == 0,
                lambda: process.poll() is None,
            )
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait()


async def test_a_server_over_http(folder: Path, http: str) -> None:
    tools = by_name(mcp_tools("here", "small", {"url": http, "auth_token": "secret"}, folder))
    for _ in range(2):  # a closed connection is opened again by the next episode
        state = await tools["add"].create(ToolContext())
        assert (await tools["add"].call(state, {"a": 2, "b": 3})).text == "5"
        await tools["add"].release(state)
