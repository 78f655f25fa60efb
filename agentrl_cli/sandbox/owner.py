"""Owner tags, to find resources of dead processes: `pid-start-namespace`, since pids are reused and not unique."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


def born(pid: str) -> str:
    """Return the time when a process started, in clock ticks as text; empty if absent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@cache
def _namespace() -> str:
    """Return the pid namespace of this process; 0 if the kernel has none."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]") or "0"
    except OSError:
        return "0"


def name() -> str:
    """Return the tag of this process, for the names of its resources."""
    return f"{os.getpid()}-{born(str(os.getpid())) or 0}-{_namespace()}"


def has_ended(name: str) -> bool:
    """Whether a name begins with the tag of a process that has ended; False for one of another namespace."""
    pid, _, rest = name.partition("-")
    start, _, rest = rest.partition("-")
    namespace = rest.partition("-")[0]
    known = pid.isdecimal() and start.isdecimal() and start != "0"
    return known and namespace == _namespace() and born(pid) != start


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Yield a folder that ends with the block, or, if this process is killed, with the next start of a run."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=f"agentrl-{kind}{_machine()}{name()}-") as made:
        yield Path(made)


def sweep() -> int:
    """Delete the temporary folders of processes of this machine that were killed. Returns how many."""
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"agentrl-*{_machine()}*"):
        if has_ended(folder.name.rpartition(_machine())[2]) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays
            removed += not folder.exists()
    return removed


def _machine() -> str:
    """This machine in the names of its folders: one for temporary files may be shared by several."""
    return f"-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"
