"""`agentrl tools`: lists tools, shows a schema, calls one by hand in the configured sandbox, serves them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import (
    Context,
    JsonOption,
    PackOption,
    ProjectOption,
    SeedOption,
    data_stdout,
    echo,
    echo_json,
    known_tools,
    narrate,
    open_project,
    packs_of,
    warn_unsafe,
)
from agentrl_cli.commands.options import SettingsOptions
from agentrl_cli.commands.place import locate
from agentrl_cli.commands.tables import Format, print_rows
from agentrl_cli.errors import NotFound, UsageError

if TYPE_CHECKING:
    from agentrl_cli.tools import Tool
    from agentrl_cli.types import ToolResult

app = typer.Typer(
    help="List tools, show a schema, call one by hand, serve them.", no_args_is_help=True
)

NameArgument = Annotated[
    str, typer.Argument(help='A tool of a pack, a built-in, or "file.py:function".')
]


@app.command("list")
def list_(
    pack: PackOption = None, project: ProjectOption = None, as_json: JsonOption = False
) -> None:
    """Print all tools: those of the project's packs, then the built-in ones.

    JSON: [{"name": "run_python", "from": "built-in", "description": "…"}, …]
    """
    found = known_tools(open_project(project, required=False), pack)
    rows = [
        [name, origin, tool.schema["function"]["description"]]
        for name, (origin, tool) in found.items()
    ]
    print_rows(["name", "from", "description"], rows, Format.json if as_json else Format.table)


@app.command()
def show(
    name: NameArgument,
    pack: PackOption = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a tool's schema, limits and examples. JSON: the OpenAI function schema."""
    context = open_project(project, required=False)
    origin, tool = _find(context, pack, name)
    if as_json:
        echo_json(tool.schema)
        return
    function = tool.schema["function"]
    echo(f"{function['name']} ({origin})\n{function['description']}\n")
    parameters = function.get("parameters", {})
    for key, schema in parameters.get("properties", {}).items():
        need = "" if key in parameters.get("required", ()) else ", optional"
        echo(f"  {key} ({_values(schema)}{need})  {schema.get('description', '')}".rstrip())
    limits = {
        **tool.own_limits(),
        "timeout": tool.timeout,
        "concurrency": tool.concurrency,
        "rate": tool.rate,
    }
    limits |= {key: True for key in ("pure", "external") if getattr(tool, key)}
    listed = ", ".join(f"{key} {value}" for key, value in limits.items() if value is not None)
    if listed:
        echo(f"\n{listed}")
    if tool.rewinds and tool.own_timeout:
        options = _session_options(context, pack, origin, tool)
        box = context.config.sandbox.limits.model_copy(update=options)
        boxed = f"{box.wall:g} s a call, {box.memory_mb} MiB, {box.output_kb} KiB of output, {box.file_mb} MiB a file"
        echo(f"\nsandbox: {boxed}, {box.disk_mb} MiB of files, no network")
    for example in tool.examples:
        given = shlex.quote(json.dumps(dict(example), ensure_ascii=False))
        echo(locate(f"\nagentrl tools call {shlex.quote(name)} {given}"))


LIMITS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "pattern": "matches {}",
}
"""Keywords of a schema, and how they are shown."""


def _values(schema: Mapping[str, Any]) -> str:
    """Return the values that a schema allows, in words."""
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_values, options))
    kinds = schema.get("type", "any")
    text = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if isinstance(schema.get("items"), Mapping):
        text += f" of {_values(schema['items'])}"
    if "enum" in schema:
        text += ", one of " + ", ".join(
            json.dumps(value, ensure_ascii=False) for value in schema["enum"]
        )
    return ", ".join(
        [text, *(words.format(schema[key]) for key, words in LIMITS.items() if key in schema)]
    )


@app.command()
def call(
    name: NameArgument,
    arguments: Annotated[
        str, typer.Argument(help='The arguments as a JSON object, e.g. {"code": "print(1)"}.')
    ] = "{}",
    pack: PackOption = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
    *,
    where: SettingsOptions,
) -> None:
    """Call a tool as an episode would, and print the text for the model. Exits with 1 if it returns an error.

    JSON: {"text": "42", "error": null, "seconds": 0.01, "level": "ns", …}
    """
    import asyncio

    from agentrl_cli.chat.parsers.base import kind, read_json
    from agentrl_cli.store.display import image_line

    given, problem = read_json(arguments)
    if problem or not isinstance(given, dict):
        raise UsageError(
            f"The arguments are {problem or kind(given)}.",
            hint=f"`agentrl tools show {name}` prints what it takes.",
        )
    context = where.open(required=False)
    origin, tool = _find(context, pack, name)
    options = {"episode_seed": seed or 0, **_session_options(context, pack, origin, tool)}
    with data_stdout():
        result = asyncio.run(_call(context, tool, given, options))
    if as_json:
        echo_json({**asdict(result), "images": len(result.images), "metrics": dict(result.metrics)})
    else:
        echo(result.text)
        level = f", sandbox {result.level}" if result.level else ""
        if result.images:
            narrate("\n".join(f"▣ {image_line(image)}" for image in result.images))
        narrate(
            f"{result.error or 'ok'}, {result.seconds:.3f} s{level}{', ends the episode' if result.done else ''}"
        )
    if result.error:
        raise typer.Exit(1)


async def _call(
    context: Context, tool: Tool, arguments: dict[str, Any], options: dict[str, Any]
) -> ToolResult:
    """Call a tool once, with its whole lifecycle; the sandbox is opened only if the tool asks for it."""
    from agentrl_cli.tools import ToolContext

    async with AsyncExitStack() as stack:

        async def session() -> Any:
            from agentrl_cli.sandbox import Sandbox

            sandbox = await Sandbox.open(context.config.sandbox)
            stack.push_async_callback(sandbox.close)
            warn_unsafe(sandbox)
            return await sandbox.session(**options)

        around = ToolContext(session_factory=session, seed=options["episode_seed"])
        stack.push_async_callback(around.close)
        state = await tool.create(around)
        try:
            return await tool.call(state, arguments, timeout=context.config.rollout.timeout.tool)
        finally:
            await tool.release(state)


def _session_options(
    context: Context, packs: list[str] | None, origin: str, tool: Tool
) -> dict[str, Any]:
    """Return the options of a tool's sandbox session: its pack's, as in an episode."""
    pack = packs_of(context, packs).get(origin)
    return {"imports": tool.imports} if pack is None else {**pack.session, "imports": pack.imports}


def _find(context: Context, packs: list[str] | None, name: str) -> tuple[str, Tool]:
    from agentrl_cli.registry import resolve
    from agentrl_cli.tools import TOOLS, as_tool

    if ":" in name:
        tool = as_tool(resolve("tools", TOOLS, name, base=context.project))
        return Path(name.partition(":")[0]).name, tool
    found = known_tools(context, packs)
    if name not in found:
        raise NotFound.of("tool", name, found)
    return found[name]
