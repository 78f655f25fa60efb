"""Whose something is that may outlive its process: `pid-start-namespace`, since ids are used again and elsewhere."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def born(pid: str) -> str:
    """When a process started, in the kernel's own words; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@cache
def _namespace() -> str:
    """The pid namespace that ids here belong to; 0 where there are none."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]") or "0"
    except OSError:
        return "0"


def name() -> str:
    """This process, for the name of what it leaves if it is killed."""
    return f"{os.getpid()}-{born(str(os.getpid())) or 0}-{_namespace()}"


def is_gone(name: str) -> bool:
    """Whether a name begins with `name()` of a process that lives no more; False for what is not ours to judge."""
    pid, _, rest = name.partition("-")
    start, _, rest = rest.partition("-")
    namespace = rest.partition("-")[0]
    return pid.isdecimal() and start.isdecimal() and namespace == _namespace() and born(pid) != start
