"""Gives up rights: capabilities, system calls, files (Landlock).

Landlock is for the files that code may touch without namespaces: ABI 6 (Linux 6.12), which also scopes signals. It
does not cover stat() of files that cannot be opened, mode and times of files of the same user, or the number of bytes
and files written.

Resource limits of one execution (setrlimit).
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterable
from typing import Any

from sandbox.filesystem.cleanup import close_after
from sandbox.isolation import seccomp
from sandbox.isolation.libc import (
    PR_CAPBSET_DROP,
    PR_CHILD_SUBREAPER,
    PR_DUMPABLE,
    PR_NO_NEW_PRIVS,
    check,
    libc,
    prctl,
    write,
)

NEEDED_ABI = 6
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a folder
_DEVICE = 1 << 1 | 1 << 2 | 1 << 15  # write, read, ioctl
_ALL = (1 << 16) - 1
_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def landlock_abi() -> int:
    """Return the kernel's version of Landlock; 0 if absent."""
    return max(0, int(libc.syscall(_CREATE_RULESET, None, 0, 1)))


def landlock_rules(work: str, readable: list[str]) -> int:
    """Returns a descriptor of rules: read the system and `readable`, do anything in `work`.

    Raises OSError, also if the kernel's Landlock is too old.
    """
    if (version := landlock_abi()) < NEEDED_ABI:
        raise OSError(95, f"Landlock has version {version} here, {NEEDED_ABI} is needed")
    rules = struct.pack("QQQ", _ALL, _TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
    fd = check(int(libc.syscall(_CREATE_RULESET, rules, len(rules), 0)), "landlock")
    for paths, rights in (((*_SYSTEM, *readable), _READ), (DEVICES, _DEVICE), ((work,), _ALL)):
        for path in paths:
            _allow(fd, path, rights)
    return fd


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # absent: nothing to allow
    with close_after(beneath):
        if not os.path.isdir(path):
            rights &= 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
        rule = struct.pack("=Qi", rights, beneath)
        check(int(libc.syscall(_ADD_RULE, rules, 1, rule, 0)), f"landlock: {path}")


_CAPABILITY_VERSION = 0x20080522
_code_filter = b""


def drop(program: bytes) -> None:
    """Gives up every capability for good, then installs the system-call filter."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    check(libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")
    install_filter(program)
    set_dumpable(False)


def install_filter(program: bytes) -> None:
    """Puts the system-call filter on this process and every process it will start."""
    prctl(PR_NO_NEW_PRIVS, 1)
    seccomp.install(program)


def prepare_code_filter(level: str, grading: bool) -> None:
    """Builds the second filter once, before any child would build it again; see seccomp.build_for_code."""
    global _code_filter
    _code_filter = seccomp.build_for_code(counted=level in ("ns", "uid"), grading=grading)


def install_code_filter() -> None:
    """Puts the second filter on a process that is about to run code."""
    seccomp.install(_code_filter)


def restrict(rules: int) -> None:
    """Puts this process and every process it will start under Landlock rules. Needs no_new_privs. Raises OSError."""
    check(int(libc.syscall(_RESTRICT_SELF, rules, 0)), "landlock")
    os.close(rules)


def set_dumpable(value: bool) -> None:
    """Opens this process's memory to other processes of its user, or closes it."""
    prctl(PR_DUMPABLE, int(value))


def prefer_for_oom_kill() -> None:
    """Makes the kernel kill this process before the sandbox's own if a cgroup or container runs out of memory."""
    write("/proc/self/oom_score_adj", "500")


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants."""
    prctl(PR_CHILD_SUBREAPER, 1)


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


def apply_limits(limits: dict[str, Any], base: int, extra_processes: int, cpu: bool) -> None:
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
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))
