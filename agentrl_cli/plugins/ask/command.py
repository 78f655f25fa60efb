"""`agentrl mcp`: commands that only read, as MCP tools on stdin and stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_cli.commands.options import StoreOptions
from agentrl_cli.errors import AgentRLError, needs_extra

LONGEST = 12_000
"""Characters of an answer."""
WIDTH = 160
"""Characters of a line behind a hit."""
PATIENCE = 120.0
"""Seconds of a command."""


def command(*, where: StoreOptions) -> None:
    """Answer a coding agent over the Model Context Protocol, on stdin and stdout: runs, episodes, failures, why.

    Nothing is changed, no code of the project is run, and every answer is at most 12,000 characters long.
    """
    make_server(where.find()).run("stdio")


def make_server(db: Path) -> Any:
    """Return the server of a store. Raises MissingDependency."""
    with needs_extra("The command mcp needs the package mcp.", "mcp"):
        from mcp.server import MCPServer

    async def runs(offset: int = 0) -> str:
        """List the runs, newest first: name, kind, status, steps, reward."""
        return await _answer(db, ["ls", "runs"], offset)

    async def run(name: str = "last", offset: int = 0) -> str:
        """Show a run: settings, course, evaluations, alerts."""
        return await _answer(db, ["show"], offset, _run_id(db, name))

    async def why(name: str = "last", offset: int = 0) -> str:
        """Name the first fault of a training, or of an episode by its id, with evidence and a command."""
        return await _answer(db, ["why"], offset, name)

    async def failures(name: str = "last", offset: int = 0) -> str:
        """Group the failed episodes of a run by what they did that the solved ones did not; with examples."""
        return await _answer(db, ["failures"], offset, name)

    async def episodes(filter: str = "", run: str = "", limit: int = 20, offset: int = 0) -> str:
        """List episodes, newest first. filter: `outcome:failed tool:NAME reward:<0.5 task:ID step:40 flag:LOOP`."""
        words = ["ls", f"--filter={filter}", f"--limit={max(limit, 1)}"]
        return await _answer(db, [*words, *([f"--run={run}"] if run else [])], offset)

    async def search(text: str, offset: int = 0) -> str:
        """List episodes whose texts match a regular expression, with the places."""
        return await _answer(db, ["ls", f"--grep={text}", "--json"], offset, clean=_excerpts)

    async def episode(id: str, offset: int = 0) -> str:
        """Show an episode whole: turns, calls, answers, rewards, checks. Also last, best, worst."""
        return await _answer(db, ["replay", "--plain", "--layer=plain"], offset, id)

    every: tuple[Callable[..., Any], ...] = (runs, run, why, failures, episodes, search, episode)
    return MCPServer("agentrl", instructions=INSTRUCTIONS, tools=[_strict(one) for one in every])


INSTRUCTIONS = (
    "The record of trainings of a tool-using model. Begin with `runs`, then `why` and `failures` of a run; `episode` "
    "shows the text of one. What is longer than an answer goes on at `offset`."
)


def _strict(function: Callable[..., Any]) -> Any:
    """Return a function as a tool that refuses unknown arguments: a misspelt name would mean the default."""
    from mcp.server.mcpserver.tools import Tool
    from mcp.types import ToolAnnotations

    note = ToolAnnotations(read_only_hint=True)
    made = Tool.from_function(function, annotations=note, structured_output=False)
    given = made.fn_metadata.arg_model
    given.model_config["extra"] = "forbid"
    given.model_rebuild(force=True)
    return made.model_copy(update={"parameters": given.model_json_schema()})


def _run_id(db: Path, name: str) -> str:
    """Return a run's id: of `show`, `last` is an episode. Raises ToolError."""
    from mcp.server.mcpserver.exceptions import ToolError

    from agentrl_cli.store import Store

    try:
        with Store.open(db, readonly=True) as store:
            return store.runs.get(name).id
    except AgentRLError as error:
        raise ToolError(f"{error.message} {error.hint}".strip()) from error


def _excerpts(printed: str) -> str:
    """Return hits in their lines, masked before they are cut: the end of a key alone looks like none."""
    from agentrl_cli.types.masking import mask_text

    found = []
    for hit in map(json.loads, printed.splitlines()):
        line, at = mask_text(hit["line"]), len(mask_text(hit["line"][: hit["start"]]))
        place = f"{hit['episode_id']}@t{hit['turn']} {hit['role']}"
        found.append(f"{place}: {line[max(0, at - 40) : at + WIDTH]}")
    return "\n".join(found)


async def _answer(
    db: Path,
    words: list[str],
    offset: int,
    name: str = "",
    clean: Callable[[str], str] | None = None,
) -> str:
    """Return the output of a command, masked, from a character on. Raises ToolError with its message."""
    import asyncio

    from mcp.server.mcpserver.exceptions import ToolError

    from agentrl_cli.types.masking import mask_text

    if name.startswith("-") or "/" in name or (name and Path(name).is_file()):
        raise ToolError(f"{name} is not the name of a run or an episode.")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentrl_cli", *words, *filter(None, [name]), "--db", str(db)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    except TimeoutError:
        raise ToolError(f"No answer in {PATIENCE:.0f} seconds.") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode and not out:
        said = mask_text(err.decode(errors="replace"))[-2000:].strip()
        raise ToolError(said or "Nothing matches.")
    text = (clean or mask_text)(out.decode(errors="replace"))[max(offset, 0) :]
    if len(text) <= LONGEST:
        return text
    return (
        f"{text[:LONGEST]}\n… {len(text) - LONGEST:,} characters follow: offset={offset + LONGEST}"
    )
