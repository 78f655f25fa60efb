"""Paths in a store: relative to its folder, so that a project can be moved, copied and renamed.

Readers get absolute paths. A path outside of the folder stays absolute.
"""

from __future__ import annotations

import functools
import itertools
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from agentrl_cli.paths import find_project, portable
from agentrl_cli.store.codec import dumps, loads


def to_stored(home: Path | None, path: str) -> str:
    """Return the form of a path in a store with the folder `home`; None is a store in memory."""
    if not path or home is None:
        return path
    for folder in (home, home.resolve()):
        for place in (Path(path), Path(path).resolve()):
            if Path(path).is_absolute() and place.is_relative_to(folder):
                return str(place.relative_to(folder))
    return path


def absolute(home: Path | None, path: str) -> str:
    """Return the absolute path for one of `to_stored`; an empty one stays empty."""
    return str(home / path) if path and home is not None else path


def new_folder(home: Path, name: str) -> Path:
    """Create a folder of this name, numbered if taken: another store here may have a run of the same name."""
    for count in itertools.count(1):
        folder = home / (name if count == 1 else f"{name}-{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: the numbers do not end")


def add_functions(conn: sqlite3.Connection) -> None:
    """Give a connection to a store with absolute paths the functions of `PLACES`; it may have been moved since.

    The last argument of each is the run's folder as stored.
    """
    file = conn.execute(
        "SELECT CAST(file AS BLOB) FROM pragma_database_list WHERE name='main'"
    ).fetchone()[0]
    home = Path(os.fsdecode(file)).parent if file else None

    @functools.cache
    def origin(folder: str) -> tuple[Path, tuple[Path, ...]]:
        """Return the store's folder when the run was stored, and the project's then and now."""
        assert home is not None
        before = Path(folder).parent if Path(folder).is_absolute() else home
        return before, tuple(_projects(home, before))

    def relative(path: str, folder: str) -> str:
        return path if home is None else _relative(home, origin(folder)[0], path)

    def inside(name: str, folder: str) -> str:
        return name if home is None else str(portable(name, origin(folder)[1]))

    def config(text: str, folder: str) -> str:
        return text if home is None else dumps(portable(loads(text), origin(folder)[1]))

    for function in (relative, inside, config):
        conn.create_function(f"agentrl_{function.__name__}", 2, function)


_DIR = "(SELECT dir FROM main.runs WHERE runs.id=run_id)"
PLACES = {
    ("checkpoints", "path"): f"agentrl_relative(path, {_DIR})",
    ("evals", "name"): f"iif(run_id IS NULL, name, agentrl_inside(name, {_DIR}))",
    ("runs", "model"): "agentrl_inside(model, dir)",
    ("runs", "config"): "agentrl_config(config, dir)",
    ("runs", "dir"): "agentrl_relative(dir, dir)",
}
"""(table, column) → the relative form of its absolute path, in SQL; the runs' folders, which the others need, last."""


def make_relative(conn: sqlite3.Connection) -> None:
    """Migrate a store with absolute paths."""
    add_functions(conn)
    for (table, column), value in PLACES.items():
        conn.execute(f"UPDATE OR REPLACE {table} SET {column}={value}")


def _relative(home: Path, before: Path, path: str) -> str:
    """Return a path in a store that was in the folder `before`, relative to its folder now."""
    given = Path(path)
    if not path:
        return path
    if not given.is_absolute():  # to the working folder of that time
        ends = (Path(*given.parts[n:]) for n in range(len(given.parts)))
        return str(next((end for end in ends if (home / end).is_dir()), given))
    near = to_stored(home, path)
    if near != path or not given.is_relative_to(before):
        return near
    end = given.relative_to(before)
    alone = not (home / end).exists() and given.exists() and not any(before.glob("*.db"))
    return path if alone else str(end)  # alone: only the store's file was moved, without its runs


def _projects(home: Path, before: Path) -> Iterator[Path]:
    """Yield the project folders of a store: now, and when the store was in `before`."""
    project = find_project(home) or (home.parent if home.name == "runs" else None)
    if project is None:
        return
    yield project
    inside = (
        home.resolve().relative_to(project.resolve())
        if home.resolve().is_relative_to(project.resolve())
        else None
    )
    if inside is not None and before.parts[len(before.parts) - len(inside.parts) :] == inside.parts:
        yield Path(*before.parts[: len(before.parts) - len(inside.parts)])
