"""Owner tags, to find resources of dead processes: `pid-start-namespace`, since pids are reused and not unique."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def born(pid: str) -> str:
    """When a process started, in clock ticks as text; empty if absent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@cache
def _namespace() -> str:
    """The pid namespace of this process; 0 if the kernel has none."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]") or "0"
    except OSError:
        return "0"


def name() -> str:
    """The tag of this process, for the names of its resources."""
    return f"{os.getpid()}-{born(str(os.getpid())) or 0}-{_namespace()}"


def has_ended(name: str) -> bool:
    """Whether a name begins with the tag of a process that has ended; False for one of another namespace."""
    pid, _, rest = name.partition("-")
    start, _, rest = rest.partition("-")
    namespace = rest.partition("-")[0]
    return pid.isdecimal() and start.isdecimal() and namespace == _namespace() and born(pid) != start
