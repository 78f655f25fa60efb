"""A memory limit that the kernel holds for everything in one runner, where this process may make cgroups (v1 or v2).

It bounds what all sessions of a runner take together, however fast; the limit of a single session is watched ten times
a second inside (`sandbox/watch.py`), with or without this.
"""

from __future__ import annotations

import os
import subprocess
import time
from functools import cache
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NAME = "agentrl-box-"


class Cgroup:
    """One cgroup with a memory limit; `remove` it when its processes are gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, number: int, limit: int) -> Cgroup | None:
        """A cgroup for a runner, limited to `limit` bytes; None where none can be made."""
        parent = place()
        return _make(parent, f"{_NAME}{os.getpid()}-{number}", limit) if parent else None

    def command(self, command: list[str]) -> list[str]:
        """The command that joins the cgroup before it becomes `command`, so that nothing is forked outside."""
        return ["/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def remove(self) -> None:
        """Takes the cgroup away; the kernel needs a moment after the end of its last process."""
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.005)


def _make(parent: Path, name: str, limit: int) -> Cgroup | None:
    folder = parent / name
    try:
        folder.mkdir()
    except OSError:
        return None
    two = (folder / "memory.max").exists()
    first, swap = ("memory.max", "memory.swap.max") if two else (
        "memory.limit_in_bytes", "memory.memsw.limit_in_bytes",
    )  # fmt: skip
    try:
        (folder / first).write_text(str(limit))
        if (folder / swap).exists():
            (folder / swap).write_text("0" if two else str(limit))
        return Cgroup(folder)
    except OSError:
        folder.rmdir()
        return None


@cache
def place() -> Path | None:
    """The folder where cgroups with a memory limit can be made and joined, found out by doing it; None without one."""
    for parent in _candidates():
        made = _make(parent, f"{_NAME}{os.getpid()}-probe", 256 << 20) if parent.is_dir() else None
        if made is None:
            continue
        try:
            done = subprocess.run(made.command(["true"]), capture_output=True, check=False, timeout=10)
        finally:
            made.remove()
        if done.returncode == 0:
            sweep(parent)
            return parent
    return None


def _candidates() -> list[Path]:
    """Where a cgroup could go: beside our own, below it, or at the top."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, kinds, own = line.split(":", 2)
        if "memory" in kinds.split(","):
            found += [_ROOT / "memory" / own.strip("/"), _ROOT / "memory"]
        elif not kinds:  # version 2: a group with processes in it passes no limits on, so rather beside ours
            here = _ROOT / own.strip("/")
            found += [here.parent if here != _ROOT else here, _ROOT]
    return list(dict.fromkeys(found))


def sweep(parent: Path) -> int:
    """Removes the cgroups of processes that are gone; returns how many."""
    removed = 0
    for folder in parent.glob(f"{_NAME}[0-9]*-*"):
        owner = folder.name.removeprefix(_NAME).partition("-")[0]
        if not Path("/proc", owner).exists():
            try:
                folder.rmdir()
                removed += 1
            except OSError:
                continue  # something in it is still ending; the next start takes it
    return removed


def describe() -> str:
    """One line for people: which limit of memory holds here."""
    parent = place()
    if parent is None:
        return "watched ten times a second (no cgroup can be made here: a burst may exceed it)"
    return f"watched ten times a second, and a cgroup for each runner ({'v1' if 'memory' in parent.parts else 'v2'})"
