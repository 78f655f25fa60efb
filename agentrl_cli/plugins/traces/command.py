"""`agentrl import atif` and `otlp`: the traces of files as episodes of a run."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    echo,
    echo_json,
    narrate,
    stop_event,
    warn,
)
from agentrl_cli.commands.imported import read_file
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import NotFound, UsageError, pluralise
from agentrl_cli.store import Store


def atif(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="A JSON document, or JSON Lines.")
    ],
    as_json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Import trajectories of the Agent Trajectory Interchange Format as episodes of a run for each file.

    What `agentrl export --format atif` wrote comes back whole. A trajectory of others has no token ids that could be
    trained on; a number `reward` or `score` in its `extra` is its reward. JSON: {"episodes": [id], "db"}
    """
    _add(files, as_json, find_db(project, db, must_exist=False))


def otlp(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="A JSON document, or JSON Lines.")
    ] = None,
    listen: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Receive OTLP over HTTP at this port of loopback; 0: a free one."
        ),
    ] = None,
    token: Annotated[
        str, typer.Option(envvar="AGENTRL_TOKEN", help="The bearer token of its senders.")
    ] = "",
    as_json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Import traces of an agent in production, an episode for each, as a run for each file.

    OTLP as JSON with GenAI or OpenInference attributes (a collector's file, a line for each export), spans of Phoenix,
    traces and observations of Langfuse, the session logs of Claude Code and Codex, rows with `messages`. A score, an
    evaluation or an annotation is the reward. With --listen they come from running agents, until ctrl+c.
    JSON: {"episodes": [id], "db"}
    """
    path = find_db(project, db, must_exist=False)
    if (listen is None) == (not files):
        raise UsageError(
            "Files are needed, or --listen, not both.", hint="agentrl import otlp --listen 4318"
        )
    if listen is None:
        _add(files or [], as_json, path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(path) as store:
        found = asyncio.run(_receive(store, listen, token, as_json))
    _report(found, as_json, path)


async def _receive(store: Store, port: int, token: str, as_json: bool) -> list[str]:
    """Return the episodes that came until a signal."""
    from agentrl_cli.agents.gateway.http import PageGuard, listening
    from agentrl_cli.plugins.traces.receive import Inbox

    inbox, ending = Inbox(store, warn), stop_event()
    async with listening(
        PageGuard(inbox.app, {"localhost"}, token=token), "127.0.0.1", port
    ) as address:
        (narrate if as_json else echo)(address)
        narrate(f"export OTEL_EXPORTER_OTLP_ENDPOINT={address}\nctrl+c ends it.")
        await ending.wait()
    inbox.write()
    return inbox.ids


def _add(files: list[Path], as_json: bool, path: Path) -> None:
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise NotFound.of(
            "file", str(missing), [str(one) for one in missing.parent.glob("*.json*")]
        )
    made = [one for one in (path, *path.parents) if not one.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    found = dict[str, None]()
    try:
        with Store.open(path) as store:
            [before] = store.select("SELECT count(*) FROM episodes")
            for file in files:
                found |= dict.fromkeys(read_file(file, store))
            [after] = store.select("SELECT count(*) FROM episodes")
    finally:
        if path in made and not found:  # nothing was imported: nothing is left
            with suppress(OSError):  # a folder may hold another's files by now
                path.unlink(missing_ok=True)
                for folder in made[1:]:
                    folder.rmdir()
    new = after[0] - before[0]
    _report([*found], as_json, path, "" if new == len(found) else f", {new} of them new,")


def _report(found: list[str], as_json: bool, path: Path, new: str = "") -> None:
    if as_json:
        echo_json({"episodes": found, "db": path})
    else:
        count = pluralise(len(found), "episode")
        narrate(f"{count}{new} in {path}: agentrl ls --db {quote(str(path))}")
