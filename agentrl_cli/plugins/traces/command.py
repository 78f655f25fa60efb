"""`agentrl import atif` and `otlp`: the traces of files as episodes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands.common import DbOption, JsonOption, ProjectOption, echo_json, narrate
from agentrl_cli.commands.imported import read_file
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import NotFound
from agentrl_cli.store import Store

FilesArgument = Annotated[
    list[Path], typer.Argument(metavar="FILE", help="A JSON document, or JSON Lines.")
]


def atif(
    files: FilesArgument,
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
    files: FilesArgument,
    as_json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Import traces of an agent in production, an episode for each, as a run for each file.

    OTLP as JSON with GenAI or OpenInference attributes (a collector's file, a line for each export), spans of Phoenix,
    traces and observations of Langfuse, the session logs of Claude Code and Codex, rows with `messages`. A score, an
    evaluation or an annotation is the reward. JSON: {"episodes": [id], "db"}
    """
    _add(files, as_json, find_db(project, db, must_exist=False))


def _add(files: list[Path], as_json: bool, path: Path) -> None:
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise NotFound.of(
            "file", str(missing), [str(one) for one in missing.parent.glob("*.json*")]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(path) as store:
        found = [episode for file in files for episode in read_file(file, store)]
    if as_json:
        return echo_json({"episodes": found, "db": path})
    narrate(f"{len(found)} episodes in {path}: agentrl ls --db {path}")
    return None
