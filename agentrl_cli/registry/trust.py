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
    mark, stat = runs_dir(place) / MARK, place.stat()
    number = f"{stat.st_dev} {stat.st_ino}\n".encode()
    with suppress(OSError):  # no mark yet
        if project is not None and mark.read_bytes() == number:
            return
    if place in _said:
        return
    _said.add(place)
    code = folder / "task.py"
    _say(
        f"This runs the code of {code if code.is_file() else folder}: use only packs that you trust."
    )
    if project is not None:
        with suppress(OSError):  # read-only: the warning is repeated next time
            mark.parent.mkdir(exist_ok=True)
            mark.write_bytes(number)
