"""`agentrl chat`: talk to a model with its tools, or act as the model, the tool or the user."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands.common import (
    JsonOption,
    console,
    echo,
    echo_jsonl,
    is_terminal,
    narrate,
)
from agentrl_cli.commands.options import ModelOptions, TemperatureOption
from agentrl_cli.commands.place import find_db

if TYPE_CHECKING:
    from agentrl_cli.tui.chat.client import ChatClient


def command(
    task: Annotated[
        str | None,
        typer.Option("--task", "-t", help="Open with this task's prompt; /reward scores it."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="Replaces the system message.")] = None,
    temperature: TemperatureOption = None,
    approve: Annotated[bool, typer.Option("--approve", help="Ask before a tool runs.")] = False,
    script: Annotated[
        Path | None, typer.Option(help="Replies of `--model scripted`: a JSON list of texts.")
    ] = None,
    say: Annotated[
        list[str] | None,
        typer.Option(
            "--say", help="Send this (a text, or a command such as /reward) and leave; repeatable."
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, no screen.")] = False,
    json: JsonOption = False,
    *,
    work: ModelOptions,
) -> None:
    """Talk to a model with the pack's tools: by default the server of the section `remote`, else the newest training's
    best checkpoint, else the base model.

    --model names another: `tiny`, a folder, a Hugging Face id, RUN@best, RUN@last or `scripted`.

    The model runs in a process of its own. In the chat, /help lists what you can do: see every token, undo, retry,
    answer as the model or as the tool, call a tool by hand, score, save as an episode. If the pack of --task
    simulates its user, that user answers too.

    With --json every event is one line: {"ev": "ready" | "token" | "turn" | "reward" | "saved" | "error" | …};
    a turn has its token ids, origins and log-probabilities. With --say the exit status is 1 if anything failed.
    """
    path = find_db(work.project, work.db, must_exist=False)
    here = work.model is not None or bool(work.open(required=False).config.remote.backend.name)
    model = work.model if here else _find_trained(path, work.sets)
    given = {"--task": task, "--system": system, "--script": script, "--temperature": temperature}
    arguments = ["--db", str(path), "--seed", str(work.seed or 0), *["--approve"] * approve]
    arguments += _list_arguments({"--model": model, **given}, work)
    from agentrl_cli.tui.chat.client import ChatClient

    client = ChatClient(arguments)
    if plain or json or say is not None or not is_terminal():
        raise typer.Exit(_plain(client, say, as_json=json))
    from agentrl_cli.tui.app import AgentApp
    from agentrl_cli.tui.chat.screen import ChatScreen

    AgentApp(path, lambda reader: ChatScreen(reader, client)).run()


def _list_arguments(given: Mapping[str, object], work: ModelOptions) -> Iterator[str]:
    """Yield the options of the model's process that have a value."""
    single = {**given, "--project": work.project}
    several = {"--pack": work.pack, "--config": work.config, "--set": work.sets}
    for name, values in {**{k: [v] for k, v in single.items()}, **several}.items():
        for value in values or ():
            if value is not None:
                yield from (name, str(value))


def _find_trained(path: Path, sets: list[str] | None) -> str | None:
    """Return the best checkpoint of the newest training, as in `eval`; None if absent or if a model was set."""
    if not path.is_file() or any(
        text.startswith(("model.name=", "remote.")) for text in sets or ()
    ):
        return None
    from agentrl_cli.store import Store
    from agentrl_cli.store.checkpoint_names import explain_best, full_name

    with Store.open(path, readonly=True) as store:
        name = full_name(store, None)
        doubt = explain_best(store, name)
    if doubt:
        narrate(doubt)
    if name is not None:
        narrate(f"talking to {name}; --model tiny is the bundled model, untrained")
    return name


def _plain(client: ChatClient, say: list[str] | None, *, as_json: bool) -> int:
    """Chat over stdin (or the texts of `say`) and stdout, for scripts; return the exit status."""
    from rich.text import Text

    from agentrl_cli.tui.chat.plain import PlainChat
    from agentrl_cli.tui.common.plain_text import STEERS

    out = console()

    def show(text: Text) -> None:
        if out.is_terminal:
            safe = (
                text
                if not STEERS.search(text.plain)
                else Text(STEERS.sub("", text.plain), text.style)
            )
            out.print(safe, soft_wrap=True)
        else:
            echo(text.plain)

    def prompt() -> None:
        if sys.stdin.isatty() and say is None:
            print("> ", end="", file=sys.stderr, flush=True)

    width = out.width if out.is_terminal else 100
    chat = PlainChat(client, show, width, (lambda event: echo_jsonl([event])) if as_json else None)
    code = asyncio.run(chat.run(iter(sys.stdin.readline, "") if say is None else iter(say), prompt))
    return code or int(say is not None and chat.errors > 0)
