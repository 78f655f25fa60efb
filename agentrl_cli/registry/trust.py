"""A pack is code: loading one runs its task.py, with all rights and the whole environment. Warns once per project.

The mark of a known project is in its `runs/` and holds the folder's device and inode numbers, so that a mark copied
with a project does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl_cli.paths import find_project, runs_dir, shipped_packs

MARK = ".met"
_say: Callable[[str], None] | None = None
_said: set[Path] = set()


@contextmanager
def saying(say: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, `say` gets one line for every new project, or pack outside a project."""
    global _say
    before, _say = _say, say
    _said.clear()
    try:
        yield
    finally:
        _say = before


def meet(folder: Path) -> None:
    """Warn if a pack is new; called before its code runs."""
    if _say is None or folder in shipped_packs().values():
        return
    project = find_project(folder)
    place = project or folder
    if place in _said or (project is not None and _is_met(project)):
        return
    _said.add(place)
    code = folder / "task.py"
    _say(
        f"This runs the code of {code if code.is_file() else folder}: use only packs that you trust."
    )
    if project is not None:
        _remember(project)


def _remember(project: Path) -> None:
    with suppress(OSError):  # read-only: the warning is repeated next time
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
