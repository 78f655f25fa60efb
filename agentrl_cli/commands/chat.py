"""`agentrl chat`: talk to a model with its tools, or act as the model, the tool or the user."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    DbOption,
    ModelOption,
    PackOption,
    ProjectOption,
    SeedOption,
    SetOption,
    find_db,
    is_terminal,
)


def command(
    model: ModelOption = None,
    pack: PackOption = None,
    task: Annotated[
        str | None, typer.Option("--task", "-t", help="Open with this task's prompt; /reward scores it.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Another system message.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-T", min=0.0, help="0 is greedy.")] = None,
    approve: Annotated[bool, typer.Option("--approve", help="Ask before a tool runs.")] = False,
    script: Annotated[Path | None, typer.Option(help="Replies of `--model scripted`: a JSON list of texts.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, no screen.")] = False,
    seed: SeedOption = None,
    project: ProjectOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    db: DbOption = None,
) -> None:
    """Talk to a model with the pack's tools: `tiny`, a folder, a Hugging Face id, RUN@best, RUN@last or `scripted`.

    The model runs in a process of its own. In the chat, /help lists what you can do: see every token, undo, retry,
    answer as the model or as the tool, call a tool by hand, score, save as an episode.
    """
    path = find_db(project, db, must_exist=False)
    arguments = ["--db", str(path), "--seed", str(seed or 0)]
    for name, value in (
        ("--model", model),
        ("--task", task),
        ("--system", system),
        ("--project", project),
        ("--temperature", temperature),
        ("--script", script),
    ):
        if value is not None:
            arguments += [name, str(value)]
    for name, values in (("--pack", pack), ("--config", config), ("--set", sets)):
        for value in values or ():
            arguments += [name, str(value)]
    if approve:
        arguments.append("--approve")
    from agentrl_cli.tui.chat_client import ChatClient

    client = ChatClient(arguments)
    if plain or not is_terminal():
        raise typer.Exit(_plain(client))
    from agentrl_cli.tui.app import AgentApp
    from agentrl_cli.tui.chat import ChatScreen

    AgentApp(path, lambda reader: ChatScreen(reader, client)).run()


def _plain(client: object) -> int:
    """The same over stdin and stdout; scripts can drive it."""
    from rich.text import Text

    from agentrl_cli.commands.common import console, echo
    from agentrl_cli.tui.chat_client import ChatClient
    from agentrl_cli.tui.chat_plain import PlainChat

    assert isinstance(client, ChatClient)
    out = console()

    def show(text: Text) -> None:
        if out.is_terminal:
            out.print(text, soft_wrap=True)
        else:
            echo(text.plain)

    def prompt() -> None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)

    width = out.width if out.is_terminal else 100
    return asyncio.run(PlainChat(client, show, width).run(sys.stdin, prompt))
