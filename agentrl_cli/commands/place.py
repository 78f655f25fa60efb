"""Where the store of a command is, found without building a configuration."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl_cli.errors import NotFound
from agentrl_cli.paths import PROJECT_FILE, default_db, find_project


def find_db(
    project: Path | None = None, db: Path | None = None, *, must_exist: bool = True
) -> Path:
    """Return the store for a command that only reads: `--db`, else the project's (`store.path`, else runs/agentrl.db).

    Raises NotFound if `must_exist` and the file is missing.
    """
    folder = None if db else find_project(override=project)
    named: str | None = None if db else os.environ.get("AGENTRL_STORE__PATH")
    if folder is not None and named is None:
        from agentrl_cli.config.yamlfile import read_yaml

        value = read_yaml(folder / PROJECT_FILE, only="store").get("store.path")
        named = str(value.value) if value is not None and value.value is not None else None
    path = (folder or Path.cwd()) / Path(named).expanduser() if named else default_db(folder)
    path = db.expanduser() if db else path
    if must_exist and not path.is_file():
        makes = (
            "`agentrl rollout` or `agentrl train` makes the store of a project; --db names another."
        )
        init = "" if db or folder else "This is not a project: `agentrl init code-task` makes one. "
        raise NotFound(f"No store at {path}.", hint=init + makes)
    return path.absolute()


def place_in(name: str) -> tuple[int, int] | None:
    """Return (turn, token) of a link `agentrl:EPISODE@t2.31`; None without a place."""
    _, _, spot = name.partition("@t")
    turn, _, token = spot.partition(".")
    if not turn.isdecimal():
        return None
    return int(turn), int(token) if token.isdecimal() else 0
