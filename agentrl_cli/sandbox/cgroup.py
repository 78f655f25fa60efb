"""Memory limits enforced by the kernel, if this process may make cgroups (v1 or v2): one for a runner, and below it one
for each box, so that a box that runs out of memory harms no other and its kills are counted apart. The runner's also
bounds the number of its processes, which RLIMIT_NPROC does not for the host's root.

Without cgroups memory is checked ten times a second inside (`sandbox/execution.py`), which a burst may outrun.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from agentrl_cli.sandbox import owner

_ROOT = Path("/sys/fs/cgroup")
_NAME = "agentrl-runner-"
_COUNTS = {"memory.events": os.O_RDONLY, "memory.oom_control": os.O_RDONLY, "memory.max_usage_in_bytes": os.O_RDWR,
           "memory.limit_in_bytes": os.O_RDONLY}  # fmt: skip
"""Files that count kills and show whether the limit was met: the first in version 2, the others in version 1. (Newer
kernels no longer count failures in version 1; writing to the peak resets it.)"""
_NUMBERS = itertools.count(1)
"""Numbers for names within this process: the kernel may take longer to remove one than the next takes to start."""


class Cgroup:
    """The cgroup of a runner: `runner` in it holds the runner itself, the others one box each. Ended by `remove`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tasks: Path | None = None
        """Where version 1 counts its processes: another hierarchy, another folder."""
        self._made = 0
        self._closed: list[Path] = []
        """Those of closed boxes: the kernel removes one a moment after its last process."""

    @classmethod
    def make(cls, limit: int, tasks: int = 0) -> Cgroup | None:
        """Return a cgroup for a runner, limited to `limit` bytes and `tasks` threads (0: any); None if none can be
        made.
        """
        parent = place()
        group = _make(parent, f"{_NAME}{owner.name()}-{next(_NUMBERS)}", limit) if parent else None
        if group and tasks:
            group.tasks = _bound_tasks(group.folder, tasks)
        return group

    def command(self, command: list[str]) -> list[str]:
        """Return the command that joins the cgroup before it becomes `command`, so that nothing is forked outside."""
        groups = [self.folder / "runner", *([self.tasks] if self.tasks else [])]
        join = " && ".join(
            f"echo $$ >{shlex.quote(str(group / 'cgroup.procs'))}" for group in groups
        )
        return ["/bin/sh", "-c", f'{join} && exec "$@"', "sh", *command]

    @property
    def bounded(self) -> bool:
        """Whether it bounds the number of processes."""
        return self.tasks is not None or (self.folder / "pids.max").exists()

    def take(self, limit: int) -> Path | None:
        """Return a cgroup for a box, limited to `limit` bytes; None if none can be made."""
        self._closed = [folder for folder in self._closed if not _delete(folder)]
        self._made += 1
        folder = self.folder / f"box{self._made}"
        try:
            folder.mkdir()
            set_limit(folder, limit)
        except OSError:
            self._closed.append(folder)
            return None
        return folder

    def give(self, folder: Path) -> None:
        """Returns the cgroup of a closed box."""
        self._closed.append(folder)

    @staticmethod
    @contextlib.contextmanager
    def files(folder: Path | None) -> Iterator[list[int]]:
        """Descriptors for the runner to join a box's cgroup and to read its kills; empty if absent."""
        fds: list[int] = []
        try:
            for name, mode in {"cgroup.procs": os.O_WRONLY, **_COUNTS}.items() if folder else ():
                if (file := Path(f"{folder}/{name}")).exists():
                    fds.append(os.open(file, mode))
            yield fds
        finally:
            for fd in fds:
                os.close(fd)

    def remove(self) -> None:
        """Ends the processes still in the cgroup and removes it; the kernel needs a moment after its last process."""
        for folder in [self.folder, *([self.tasks] if self.tasks else [])]:
            _end(folder, 100)


def _bound_tasks(folder: Path, most: int) -> Path | None:
    """Limits a runner's cgroup to `most` threads. Returns the folder in which version 1 counts them.

    Has no effect if the kernel or the rights for it are missing: then only the box's supervisor limits them.
    """
    with contextlib.suppress(OSError):
        if (folder / "memory.max").exists():
            if (folder / "pids.max").exists():
                (folder / "pids.max").write_text(str(most))
            return None
        tasks = _ROOT / "pids" / folder.name
        if not tasks.parent.is_dir():
            return None
        tasks.mkdir()
        (tasks / "pids.max").write_text(str(most))
        return tasks
    return None


def _delete(folder: Path) -> bool:
    """Removes a cgroup and those below it; returns False if something still runs there."""
    try:
        for below in [entry for entry in folder.iterdir() if entry.is_dir()]:
            below.rmdir()
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _make(parent: Path, name: str, limit: int) -> Cgroup | None:
    folder = parent / name
    try:
        folder.mkdir()
    except OSError:
        return None
    group = Cgroup(folder)
    try:
        if (folder / "memory.max").exists():  # version 2
            (folder / "cgroup.subtree_control").write_text("+memory")
        set_limit(folder, limit)
        (folder / "runner").mkdir()
        return group
    except OSError:
        _delete(folder)
        return None


def set_limit(folder: Path, limit: int) -> None:
    """Limits memory, without swap. In version 1 the limit of both together must never be the smaller one."""
    if (folder / "memory.max").exists():
        (folder / "memory.max").write_text(str(limit))
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
        return
    both = [folder / "memory.limit_in_bytes", folder / "memory.memsw.limit_in_bytes"]
    if not both[1].exists():
        both.pop()
    elif limit > int(both[0].read_text()):
        both.reverse()
    for file in both:
        file.write_text(str(limit))


@cache
def place() -> Path | None:
    """Return the folder in which cgroups with a memory limit can be made and joined, found by
    trying; None if absent.
    """
    for parent in _candidates():
        made = _make(parent, f"{_NAME}{owner.name()}-probe", 256 << 20) if parent.is_dir() else None
        if made is None:
            continue
        try:
            done = subprocess.run(made.command(["true"]), capture_output=True, check=False)
            if done.returncode == 0 and (box := made.take(64 << 20)):
                with made.files(box):
                    return parent
        except OSError:
            continue
        finally:
            made.remove()
    return None


def _candidates() -> list[Path]:
    """Return the candidate parents: beside this process's own cgroup, below it, or at the top."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, kinds, own = line.split(":", 2)
        if "memory" in kinds.split(","):
            found += [_ROOT / "memory" / own.strip("/"), _ROOT / "memory"]
        elif (
            not kinds
        ):  # version 2: a group with processes passes no limits on, so first beside the own one
            here = _ROOT / own.strip("/")
            found += [here.parent if here != _ROOT else here, _ROOT]
    return list(dict.fromkeys(found))


def sweep(root: Path | None = None) -> int:
    """Ends and removes cgroups that processes left behind; returns how many.

    An earlier process may have run in another cgroup, so everything below the root is searched.
    """
    removed = 0
    for top in [root] if root else [_ROOT / "memory", _ROOT / "pids", _ROOT]:
        if not ((top / "cgroup.procs").exists() or root):
            continue
        for at, names, _ in os.walk(top):
            for name in [name for name in names if name.startswith(_NAME)]:
                names.remove(name)
                if owner.has_ended(name.removeprefix(_NAME)):
                    removed += _end(Path(at, name))
    return removed


def _end(folder: Path, tries: int = 20) -> bool:
    """Kills the processes in a cgroup and removes it; False if that takes longer: the next start has to do it."""
    for _ in range(tries):
        if _delete(folder):
            return True
        for procs in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                for pid in procs.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.005)
    return False


def describe() -> str:
    """Return a line for people on how memory is limited here."""
    parent = place()
    if parent is None:
        return "watched ten times a second (no cgroup can be made here: a burst may exceed it)"
    return f"watched ten times a second, and a cgroup for each session ({'v1' if 'memory' in parent.parts else 'v2'})"
