"""Resource limits of one execution (setrlimit)."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from functools import cache
from typing import Any


def virtual_size() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def count_threads() -> int:
    """Return the threads of this user on the whole machine, as RLIMIT_NPROC counts outside a user namespace."""
    total, me = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == me:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return total


def apply(limits: dict[str, Any], base: int, extra_processes: int, cpu: bool) -> None:
    """Sets the limits of one execution.

    `base`: address space of the empty interpreter, in bytes, which does not count. `extra_processes`: processes that
    count against the limit and are not the execution's. `cpu`: limit CPU time too.
    """
    space = base + (int(limits["memory_mb"]) << 20)
    file_size = int(limits["file_mb"]) << 20
    processes = limits["processes"] + extra_processes
    pairs = [
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 65536, 65536),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_MSGQUEUE, 65536, 65536),
        (resource.RLIMIT_AS, space, space),
    ]
    if cpu:
        seconds = max(1, int(-(-limits["cpu"] // 1)))
        pairs.append((resource.RLIMIT_CPU, seconds, seconds + 1))
    set_limits(pairs)


def set_limits(limits: Iterable[tuple[int, int, int]]) -> None:
    """Sets soft and hard limits, none above the present hard one."""
    for which, soft, hard in limits:
        most = _hard_limit(which)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))


@cache
def _hard_limit(which: int) -> int:
    """Return the hard limit of a box, which never changes its own."""
    return resource.getrlimit(which)[1]


def look_up() -> None:
    """Looks the hard limits up once, before any child would do it again."""
    for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK,
                  resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CPU,
                  resource.RLIMIT_MSGQUEUE):  # fmt: skip
        _hard_limit(which)
