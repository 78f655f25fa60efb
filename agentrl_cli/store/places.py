"""Paths in a store: relative to its folder, so that a project can be moved, copied and renamed.

Readers get absolute paths. A path outside of the folder stays absolute.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from agentrl_cli.paths import find_project, portable
from agentrl_cli.store.codec import dumps, loads


def stored(home: Path | None, path: str) -> str:
    """The form of a path in a store with the folder `home`; None is a store in memory."""
    if not path or home is None:
        return path
    for folder in (home, home.resolve()):
        for place in (Path(path), Path(path).resolve()):
            if Path(path).is_absolute() and place.is_relative_to(folder):
                return str(place.relative_to(folder))
    return path


def absolute(home: Path | None, path: str) -> str:
    """The absolute path for a `stored` one; an empty one stays empty."""
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


def make_relative(conn: sqlite3.Connection) -> None:
    """The migration of a store with absolute paths, which may have been moved since it was made."""
    file = conn.execute("PRAGMA database_list").fetchone()[2]
    if not file:
        return
    home = Path(file).parent
    for run, folder, model, config in conn.execute("SELECT id, dir, model, config FROM runs").fetchall():
        before = Path(folder).parent if Path(folder).is_absolute() else home
        roots = tuple(_projects(home, before))
        values = (_relative(home, before, folder), portable(model, roots), dumps(portable(loads(config), roots)))
        conn.execute("UPDATE runs SET dir=?, model=?, config=? WHERE id=?", (*values, run))
        for row, path in conn.execute("SELECT id, path FROM checkpoints WHERE run_id=?", (run,)).fetchall():
            conn.execute("UPDATE OR REPLACE checkpoints SET path=? WHERE id=?", (_relative(home, before, path), row))
        for row, name in conn.execute("SELECT id, name FROM evals WHERE run_id=?", (run,)).fetchall():
            conn.execute("UPDATE evals SET name=? WHERE id=?", (portable(name, roots), row))


def _relative(home: Path, before: Path, path: str) -> str:
    """A path in a store that was in the folder `before`, relative to its folder now."""
    given = Path(path)
    if not path:
        return path
    if not given.is_absolute():  # to the working folder of that time
        ends = (Path(*given.parts[n:]) for n in range(len(given.parts)))
        return str(next((end for end in ends if (home / end).is_dir()), given))
    near = stored(home, path)
    if near != path or not given.is_relative_to(before):
        return near
    end = given.relative_to(before)
    alone = not (home / end).exists() and given.exists() and not any(before.glob("*.db"))
    return path if alone else str(end)  # alone: only the store's file was moved, without its runs


def _projects(home: Path, before: Path) -> Iterator[Path]:
    """The project folders of a store: now, and when the store was in `before`."""
    project = find_project(home) or (home.parent if home.name == "runs" else None)
    if project is None:
        return
    yield project
    inside = home.resolve().relative_to(project.resolve()) if home.resolve().is_relative_to(project.resolve()) else None
    if inside is not None and before.parts[len(before.parts) - len(inside.parts) :] == inside.parts:
        yield Path(*before.parts[: len(before.parts) - len(inside.parts)])
