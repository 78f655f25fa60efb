"""A pack is code: who loads one runs its task.py, with all rights and the whole environment. Said once a project.

The mark that a project was met lies in its `runs/` and holds the number that this machine's file system gave the
folder, so that no mark that came with a project counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl_cli.paths import find_project, packs_dir, runs_dir

MARK = ".met"
_say: Callable[[str], None] | None = None
_said: set[Path] = set()


@contextmanager
def saying(say: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile `say` gets one line for every project, or pack outside of one, that was not met before."""
    global _say
    before, _say = _say, say
    _said.clear()
    try:
        yield
    finally:
        _say = before


def meet(folder: Path) -> None:
    """A pack's code is about to run."""
    if _say is None or folder.is_relative_to(packs_dir()):
        return
    project = find_project(folder)
    place = project or folder
    if place in _said or (project is not None and _is_met(project)):
        return
    _said.add(place)
    _say(f"This runs the code of {folder / 'task.py'}: use only packs that you trust.")
    if project is not None:
        _remember(project)


def _remember(project: Path) -> None:
    with suppress(OSError):  # it may be read-only: then it is said again
        runs_dir(project).mkdir(exist_ok=True)
        (runs_dir(project) / MARK).write_text(_number(project), encoding="utf-8")


def _is_met(project: Path) -> bool:
    try:
        return (runs_dir(project) / MARK).read_text(encoding="utf-8") == _number(project)
    except (OSError, UnicodeDecodeError):
        return False


def _number(project: Path) -> str:
    found = project.stat()
    return f"{found.st_dev} {found.st_ino}\n"
