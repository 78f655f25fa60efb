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
    narrate,
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
    """Talk to a model with the pack's tools: by default the newest training's best checkpoint, else the base model.

    --model names another: `tiny`, a folder, a Hugging Face id, RUN@best, RUN@last or `scripted`.

    The model runs in a process of its own. In the chat, /help lists what you can do: see every token, undo, retry,
    answer as the model or as the tool, call a tool by hand, score, save as an episode.
    """
    path = find_db(project, db, must_exist=False)
    model = model or _trained(path, sets)
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
    _talk(path, arguments, plain=plain or not is_terminal())


def _talk(path: Path, arguments: list[str], *, plain: bool) -> None:
    """The chat itself, over lines or on the screen."""
    from agentrl_cli.tui.chat_client import ChatClient

    client = ChatClient(arguments)
    if plain:
        raise typer.Exit(_plain(client))
    from agentrl_cli.tui.app import AgentApp
    from agentrl_cli.tui.chat import ChatScreen

    AgentApp(path, lambda reader: ChatScreen(reader, client)).run()


def _trained(path: Path, sets: list[str] | None) -> str | None:
    """The best checkpoint of the newest training, as `eval` takes it; None where there is none, or a model was set."""
    if not path.is_file() or any(text.startswith("model.name=") for text in sets or ()):
        return None
    from agentrl_cli.commands.checkpoints import full_name
    from agentrl_cli.store import Store

    with Store.open(path, readonly=True) as store:
        name = full_name(store, None)
    if name is not None:
        narrate(f"talking to {name}; --model tiny is the bundled model as it came")
    return name


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
