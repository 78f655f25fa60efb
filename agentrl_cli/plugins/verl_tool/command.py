"""`agentrl tools serve`: the tools of a project over HTTP or a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    PackOption,
    ProjectOption,
    SetOption,
    echo,
    known_tools,
    narrate,
    open_project,
    packs_of,
    stop_event,
    warn_bare,
    warn_unsafe,
)
from agentrl_cli.commands.options import plugin_settings, refuse_idle
from agentrl_cli.errors import UsageError
from agentrl_cli.registry import resolve

if TYPE_CHECKING:
    from agentrl_cli.commands.common import Context
    from agentrl_cli.plugins.verl_tool.app import ToolServer
    from agentrl_cli.tools import Tool

SWEEP = 30.0
"""Seconds between checks for idle trajectories."""
HOST, PORT, IDLE, PARSER = "127.0.0.1", 7676, 900.0, "hermes"
IGNORED = {
    "--socket": ("--host", "--port", "--allow-host"),
    "--stdio": ("--host", "--port", "--allow-host", "--no-auth", "--idle"),
    "--mcp": ("--socket", "--parser", "--done-if-invalid"),
}
"""Option to those that do nothing beside it."""
UNWIRED = ("--mcp", "--socket", "--journal", "--idle", "--parser", "--done-if-invalid")
"""Options that do nothing beside a protocol of a plugin."""


HostOption = Annotated[
    str, typer.Option(help="Address to listen on; beyond loopback, other machines can connect.")
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")]
SocketOption = Annotated[
    Path | None, typer.Option(help="Listen on this Unix socket (mode 600) instead.")
]
TokenOption = Annotated[
    str | None, typer.Option(envvar="AGENTRL_TOKEN", help="The token; by default a new one.")
]
NoAuthOption = Annotated[
    bool, typer.Option("--no-auth", help="Require no token; any user of this machine may call.")
]
JournalOption = Annotated[
    Path | None, typer.Option(help="The journal of calls; default: runs/tool-server.db.")
]
MaxOption = Annotated[
    int, typer.Option(min=1, help="Calls that run or wait at once; more are answered with 429.")
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(help="Another host name that clients use for this machine; repeatable."),
]
IdleOption = Annotated[
    float, typer.Option(min=1, help="Seconds until an idle trajectory releases its sandbox.")
]
InvalidOption = Annotated[
    bool,
    typer.Option(
        "--done-if-invalid",
        help="As in verl-tool: an action without a valid call ends its trajectory.",
    ),
]
McpOption = Annotated[
    bool,
    typer.Option("--mcp", help="Speak MCP instead: streamable HTTP, a state for each session."),
]
StdioOption = Annotated[
    bool, typer.Option("--stdio", help="With --mcp: on stdin and stdout, for one client.")
]
ParserOption = Annotated[str, typer.Option(help="Tool-call syntax of verl-tool's actions.")]


def serve(
    pack: PackOption = None,
    host: HostOption = HOST,
    port: PortOption = PORT,
    socket: SocketOption = None,
    token: TokenOption = None,
    no_auth: NoAuthOption = False,
    allow_host: AllowHostOption = None,
    journal: JournalOption = None,
    max_calls: MaxOption = 256,
    idle: IdleOption = IDLE,
    done_if_invalid: InvalidOption = False,
    parser: ParserOption = PARSER,
    mcp: McpOption = False,
    stdio: StdioOption = False,
    project: ProjectOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Serve the tools of the project's packs, or of --pack, and the built-in ones; ctrl+c stops the server.

    A rollout uses it with `--set tool_server.url=http://127.0.0.1:7676` and the token in AGENTRL_TOKEN. Speaks a
    typed protocol (/v1/…) and verl-tool's (/get_observation, /health, /metrics). Every call is journalled under its
    key before it runs: no retry runs it twice, and after a restart a trajectory's state is rebuilt.
    """
    changed = {"--host": host != HOST, "--port": port != PORT, "--idle": idle != IDLE}
    changed |= {"--parser": parser != PARSER, "--done-if-invalid": done_if_invalid}
    ways = {"--socket": socket, "--stdio": stdio, "--mcp": mcp, "--no-auth": no_auth}
    given: dict[str, object] = {**changed, **ways, "--allow-host": allow_host, "--journal": journal}
    _check_options(host, given)
    context, wire = _open(project, config, sets)
    secret = "" if no_auth else token or secrets.token_urlsafe(24)
    names = {"localhost", host, gethostname(), *(allow_host or ())}
    where = {"host": host, "port": port, "token": secret, "names": names}
    packs = packs_of(context, pack)
    if wire:
        refuse_idle(f"with --{wire}", {name: given[name] for name in UNWIRED})
        wired = _serve_wire(wire, context, [*packs.values()], {**where, "most": max_calls})
        return asyncio.run(wired)
    tools = {name: tool for name, (_, tool) in known_tools(context, pack).items()}
    path = journal or context.project / "runs" / "tool-server.db"
    options = {"token": secret, "limit": max_calls, "done_if_invalid": done_if_invalid}
    sessions = {name: one.session for name, one in packs.items()}
    way = "stdio" if stdio else "http" if mcp else ""
    serving = _serve(context, tools, path, options, parser, where, socket, idle, sessions, way)
    return asyncio.run(serving)


def _check_options(host: str, given: Mapping[str, object]) -> None:
    """Raise UsageError for options that do nothing beside others, and for an open door to other machines."""
    from agentrl_cli.agents.gateway.http import is_loopback

    refuse_idle("without --mcp", {"--stdio": given["--stdio"] and not given["--mcp"]})
    for way, names in IGNORED.items():
        refuse_idle(f"with {way}", {name: given[way] and given[name] for name in names})
    if given["--no-auth"] and not given["--socket"] and not is_loopback(host):
        raise UsageError(
            "--no-auth works only on a loopback address.", hint="Remove --no-auth or --host."
        )


def _open(project: Path | None, config: Any, sets: Any) -> tuple[Context, str]:
    """Return the project with the settings of plugins' options, and the wire that one of them names."""
    flags = plugin_settings()
    settings = {name: value for name, value in flags.items() if "." in name}
    wire = next((name for name in flags if flags[name] and name not in settings), "")
    given = [name for name, value in settings.items() if value]
    if wire and given:
        raise UsageError(f"--{wire} goes without {', '.join(given)}.")
    return open_project(project, None, config, sets, settings, required=False), wire


async def _serve_wire(wire: str, context: Context, packs: list[Any], where: dict[str, Any]) -> None:
    """Serve packs by another protocol until a signal comes."""
    ending = stop_event()
    async with resolve("wires", {}, wire)(context, packs, **where) as address:
        _announce(context, address, where["token"])
        await ending.wait()


def _announce(context: Context, address: str, token: str) -> None:
    echo(address)
    warn_bare(context.config.sandbox)
    if token:
        narrate(f"export AGENTRL_TOKEN={token}")
    else:
        narrate("No token: every user of this machine can run these tools.")


async def _serve(
    context: Context,
    tools: Mapping[str, Tool],
    journal: Path,
    options: Mapping[str, Any],
    parser: str,
    where: dict[str, Any],
    socket: Path | None,
    idle: float,
    sessions: Mapping[str, Mapping[str, Any]],
    mcp: str,
) -> None:
    from agentrl_cli.plugins.verl_tool.mcp import mcp_server, serve_http, serve_stdio

    async with open_server(context, tools, journal, options, parser, sessions) as server:
        if mcp == "stdio":
            warn_bare(context.config.sandbox)
            return await serve_stdio(mcp_server(server))
        ending = stop_event()
        opening = (
            serve_http(mcp_server(server), **where, idle=idle)
            if mcp
            else listening(server, where["host"], where["port"], socket, where["names"])
        )
        async with opening as address:
            _announce(context, address, where["token"])
            again = "" if mcp else ", a restart rebuilds open trajectories"
            narrate(f"{len(tools)} tools; ctrl+c stops the server{again}.")
            while not ending.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), SWEEP)
                await server.trajectories.sweep(idle)
            server.draining = True
            await server.trajectories.shutdown()
    return None


@contextlib.asynccontextmanager
async def open_server(
    context: Context,
    tools: Mapping[str, Tool],
    journal: Path,
    options: Mapping[str, Any],
    parser: str,
    sessions: Mapping[str, Mapping[str, Any]] | None = None,
) -> AsyncIterator[ToolServer]:
    """Yield the server without its address: journal, trajectories, and a sandbox that opens with the first call.

    `sessions`: each pack's options for its sandbox sessions, such as limits.
    """
    from agentrl_cli.chat.parsers import load_parser
    from agentrl_cli.plugins.verl_tool.app import ToolServer
    from agentrl_cli.plugins.verl_tool.journal import Journal
    from agentrl_cli.plugins.verl_tool.trajectories import Trajectories
    from agentrl_cli.rollout.recorder import make_observers
    from agentrl_cli.sandbox import Sandbox

    imports = {name for tool in tools.values() for name in tool.imports}
    opened: list[Sandbox] = []
    lock = asyncio.Lock()
    config = context.config

    async def session(**more: Any) -> Any:
        async with lock:
            if not opened:
                opened.append(await Sandbox.open(config.sandbox))
                if config.sandbox.backend != "bare":  # else the warning was printed at the start
                    warn_unsafe(opened[0])
        return await opened[0].session(**{**more, "imports": {*imports, *more.get("imports", ())}})

    syntax = load_parser(parser)
    book = Journal(journal)
    try:
        trajectories = Trajectories(
            [*tools.values()], book, open_session=session, limits=config.rollout, sessions=sessions
        )
        trajectories.observers = make_observers(config, "call_observers")
        try:
            yield ToolServer(trajectories, syntax, **options)
        finally:
            await trajectories.shutdown()
    finally:
        for sandbox in opened:
            await sandbox.close()
        book.close()


@contextlib.asynccontextmanager
async def listening(
    server: ToolServer, host: str, port: int, socket: Path | None, names: Collection[str] = ()
) -> AsyncIterator[str]:
    """Answers requests; yields the address for `tool_server.url`. Raises UsageError if it is in use.

    `names`: host names that clients may use, besides this machine's own name and addresses.
    """
    own = {"localhost", host, gethostname(), *names}
    app = server.app(None if socket is not None else {name.casefold() for name in own})
    from aiohttp import web

    from agentrl_cli.agents.gateway.http import place_of

    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        try:
            if socket is not None:
                mask = os.umask(0o177)
                try:
                    await web.UnixSite(runner, str(socket)).start()
                finally:
                    os.umask(mask)
            else:
                await web.TCPSite(runner, host, port).start()
        except OSError as error:
            hint = "Use another --port or --socket."
            raise UsageError(f"Cannot listen: {error.strerror or error}.", hint=hint) from error
        if socket is not None:  # the server's own now: what had its place before is not deleted
            stack.callback(socket.unlink, missing_ok=True)
        yield (
            f"unix:{socket.absolute()}"
            if socket is not None
            else f"http://{place_of(host, runner.addresses[0][1])}"
        )
