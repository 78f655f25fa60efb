"""Where the store of a command is, found without building a configuration; and the place in commands of messages."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

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


_given: dict[str, str] = {}
_load: list[Callable[[str], Any]] = []


def begin_command(load: Callable[[str], Any]) -> None:
    """Forget the place of an earlier command; `load` returns a command by its name, None if there is no such one."""
    _given.clear()
    _load[:] = [load]


def keep_place(ctx: typer.Context, param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Note the value of an option that names a place, unless it is of the environment."""
    source = getattr(ctx.get_parameter_source(str(param.name)), "name", "")
    if value is not None and source == "COMMANDLINE":
        _given[param.opts[0]] = str(value)
    return value


def locate(text: str) -> str:
    """Return a message whose commands name the --project and --db of this one: they run as printed."""

    def name_place(found: re.Match[str]) -> str:
        command = _load[0](found[1])
        sub = getattr(command, "commands", {}).get((found[2] or "").strip())
        words = found[0] if sub is not None else f"agentrl {found[1]}"
        rest = text[found.start() + len(words) :]
        taken = {name for one in getattr(sub or command, "params", ()) for name in one.opts}
        span = re.split("[`\n]", rest)[0]
        more = [
            f" {name} {shlex.quote(value)}"
            for name, value in _given.items()
            if name in taken and name not in span and not rest.startswith(" --help")
        ]
        return words + "".join(more) + found[0].removeprefix(words)

    return re.sub(r"(?<![\w./-])agentrl ([a-z]+)( [a-z]+)?", name_place, text) if _given else text


def place_in(name: str) -> tuple[int, int] | None:
    """Return (turn, token) of a link `agentrl:EPISODE@t2.31`; None without a place."""
    _, _, spot = name.partition("@t")
    turn, _, token = spot.partition(".")
    if not turn.isdecimal():
        return None
    return int(turn), int(token) if token.isdecimal() else 0
