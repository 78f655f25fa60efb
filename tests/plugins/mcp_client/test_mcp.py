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
from agentrl_cli.plugins.mcp_client.client import Connection, mcp_tools
from agentrl_cli.plugins.mcp_client.server import reset_tools
from agentrl_cli.tools import Tool, ToolContext
from agentrl_cli.tools.configured import load_tools
from tests.helpers.cli import Cli
from tests.helpers.processes import comes, free_port
from tests.helpers.web import calls

pytest.importorskip("mcp")

SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import EmbeddedResource, ResourceLink, TextResourceContents

server = MCPServer("small")
count = 0

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

@server.tool(structured_output=False)
def look():
    """Answer a resource and a link."""
    text = TextResourceContents(uri="memo://1", text="It rains.")
    link = ResourceLink(type="resource_link", uri="memo://2", name="two", description="The next.")
    return [EmbeddedResource(type="resource", resource=text), link]

if __name__ == "__main__":
    if sys.argv[-1].isdigit():
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
'''
# The protocol in a process that starts at once; the package's own server takes a second.
STUB = """
import json, os, sys

with open("starts", "a") as starts:
    starts.write("x")
if "die" in sys.argv or "late" in sys.argv and os.path.getsize("starts") == 2:
    sys.exit("no licence found")
declared = {"extensions": {"org.example/reset": {"tool": "restart"}}} if "declare" in sys.argv else {}
count = restarts = 0

def listed(at):
    if "endless" in sys.argv:
        names, more = [f"t{at + n}" for n in range(50)], {"nextCursor": str(at + 50)}
    else:
        names, more = ["add", "step", "restart", "leave"], {}
    return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names], **more}

def called(name):
    global count, restarts
    if name == "leave":
        os._exit(3)
    if name == "restart":  # twice at most
        restarts, count = restarts + 1, 0
        return {"content": [{"type": "text", "text": "ready"}], "isError": restarts > 2}
    count += 1
    if name == "add":
        return {"content": [], "structuredContent": {"sum": count}}
    return {"content": [{"type": "text", "text": str(count)}]}

for line in sys.stdin:
    asked = json.loads(line)
    given = asked.get("params", {})
    if asked["method"] == "initialize":
        about = {"serverInfo": {"name": "small", "version": "1"}, "protocolVersion": given["protocolVersion"]}
        result = {**about, "capabilities": {"tools": {}, **declared}}
    elif asked["method"] == "tools/list" and "slow" not in sys.argv:
        result = listed(int(given.get("cursor") or 0))
    elif asked["method"] == "tools/call":
        result = called(given["name"])
    else:
        if "id" in asked and "slow" not in sys.argv:
            error = {"code": -32601, "message": "Method not found"}
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "stub.py").write_text(STUB)
    return tmp_path


def stub(*args: str, **more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["stub.py", *args], **more}


def by_name(tools: list[Tool]) -> dict[str, Tool]:
    return {tool.name: tool for tool in tools}


async def test_a_server_over_stdio(folder: Path) -> None:
    given = {"command": sys.executable, "args": ["server.py"], "env": {"MOOD": "good"}}
    tools = by_name(mcp_tools("here", "small", given, folder))
    assert list(tools) == ["add", "step", "crawl", "fail", "look"]
    assert all(tool.external for tool in tools.values())
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
    answer = await tools["look"].call(states["look"], {})
    assert answer.text == "[resource memo://1]\nIt rains.\n[resource_link memo://2] two — The next."
    late = await tools["crawl"].call(states["crawl"], {}, timeout=1.5)
    assert late.error == "timeout" and late.text.endswith("Its last progress: 1 of 3, one of three")
    assert (await tools["step"].call(states["step"], {})).text == "101 good", "the server noticed"
    for name, tool in tools.items():
        await tool.release(states[name])


@pytest.mark.parametrize(("session", "seen"), [("episode", ["1", "1"]), ("shared", ["1", "2"])])
async def test_episodes_have_a_server_of_their_own_unless_it_is_shared(
    folder: Path, session: str, seen: list[str]
) -> None:
    tools = by_name(mcp_tools("here", "small", stub(session=session), folder))
    states = [await tools["step"].create(ToolContext()) for _ in seen]
    assert [(await tools["step"].call(state, {})).text for state in states] == seen
    with pytest.raises(EnvError, match="was lost"):
        await tools["leave"].call(states[0], {})
    for state in states:
        await tools["step"].release(state)
    assert [one.text for one in await calls(tools["step"], {})] == ["1"]
    assert [one.text for one in await calls(tools["add"], {})] == ['{"sum": 1}']  # structured alone


async def test_a_server_is_started_once_and_reset_as_it_declares(folder: Path) -> None:
    from mcp_types import ServerCapabilities

    before = ServerCapabilities(experimental={"reset": {"tool": "restart"}})
    assert reset_tools(before) == ["restart"] and reset_tools(ServerCapabilities()) == []
    assert "restart" not in by_name(mcp_tools("here", "small", stub(reset="restart"), folder))
    (folder / "starts").unlink()
    tools = by_name(mcp_tools("here", "small", stub("declare"), folder))
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
    assert [text for _, text in seen] == ["1"] * 5
    assert len({place for place, _ in seen[:4]}) == 1, "one connection, whose third reset failed"
    link: Any = tools["step"]
    idle: list[Connection] = [one for waiting in link.link._idle.values() for one in waiting]
    assert len(idle) == 1 and idle[0].until is not None
    assert len((folder / "starts").read_text()) == 4, (
        "to list its tools, for the first, after a failed reset, and lost"
    )
    await idle[0].close()
    with pytest.raises(ConfigError, match="nowhere"):
        mcp_tools("here", "small", stub(reset="nowhere"), folder)


@pytest.mark.parametrize("more", [{}, {"reset": "restart"}])
async def test_a_server_that_did_not_start_is_tried_again(folder: Path, more: Any) -> None:
    step = by_name(mcp_tools("here", "small", stub("late", **more), folder))["step"]
    ctx = ToolContext()
    with pytest.raises(EnvError, match="no licence found"):
        await step.create(ctx)
    states = [await step.create(one) for one in (ctx, ToolContext())]
    assert states[0] is not states[1]
    for state in states:
        assert (await step.call(state, {})).text == "1"
        state.broken = True  # so that none waits for another episode
        await step.release(state)


async def test_chosen_tools_under_a_prefix_and_from_a_file_of_servers(folder: Path) -> None:
    given = {
        "a": stub(tools=["step"], prefix="a_", session="episode"),
        "b": stub(tools=["step", "add"]),
    }
    tools = by_name(load_tools([{"mcp": given}], folder))
    assert list(tools) == ["a_step", "step", "add"]
    assert tools["a_step"].schema["function"]["name"] == "a_step"
    assert [one.text for one in await calls(tools["a_step"], {})] == ["1"]
    with pytest.raises(ConfigError, match="'ad'") as caught:
        mcp_tools("here", "small", stub(tools=["ad"]), folder)
    assert "add" in (caught.value.hint or "")
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"small": stub()}}))
    chosen = {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["add"]}
    entry = {"config": {"type": "mcp"}, "mcp": chosen}
    assert [tool.name for tool in load_tools([entry], folder)] == ["add"]
    entries = [{"mcp": {"a": server}} for server in (given["a"], stub("other", tools=["add"]))]
    ctx, both = ToolContext(), load_tools(entries, folder)
    states = [await tool.create(ctx) for tool in both]
    assert states[0] is not states[1], "servers of one name in two entries are two"
    for tool, state in zip(both, states, strict=True):
        await tool.release(state)
    chosen["tool_selected_list"] = ["ad"]
    with pytest.raises(ConfigError, match="the servers have no ad"):
        load_tools([entry], folder)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (stub("die"), r"last lines of its stderr:\n  no licence found"),
        ({"command": "no-such-command"}, "small cannot be reached"),
        ({"url": "http://127.0.0.1:9/mcp", "start_timeout": 5}, "small cannot be reached"),
        (stub("endless"), "small lists no tools: it has more than 2000"),
    ],
)
def test_servers_that_cannot_be_used(folder: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvError, match=said):
        mcp_tools("here", "small", given, folder)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"mcp": {"x": {"command": "a", "url": "b"}}}, "either a command or a url"),
        ({"mcp": {"x": {"command": "a", "sesion": "b"}}}, "sesion"),
        ({"mcp": {"mcp_servers_config_path": "missing.json"}}, "does not exist"),
        ({"mcp": {}}, "no MCP server is named"),
    ],
)
def test_entries_that_cannot_be(tmp_path: Path, entry: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tools([entry], tmp_path)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_a_server_is_not_waited_for_for_ever(folder: Path) -> None:
    said = r"slow (?:lists no tools|cannot be reached): it took .* 2\.5 s"
    for given in (stub("slow"), {"command": sys.executable, "args": ["-c", "while True: input()"]}):
        with pytest.raises(EnvError, match=said) as late:
            mcp_tools("here", "slow", given | {"start_timeout": 2.5}, folder)
        assert "start_timeout: 5}" in late.value.hint


@pytest.fixture
def http(folder: Path) -> Iterator[str]:
    port = free_port()
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
        assert [one.text for one in await calls(tools["add"], {"a": 2, "b": 3})] == ["5"]


def test_a_server_that_is_no_command_is_refused(cli: Cli) -> None:
    cli("init", "p", "--from", 'mcp:python "server.py', code=2, said="No closing quotation")
    cli("init", "p", "--from", "mcp:", code=2, said="No MCP server is named")
