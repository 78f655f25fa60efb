"""Landlock: the files that code may touch without namespaces. Needs ABI 6 (Linux 6.12), which also scopes signals.

It does not cover stat() of files that cannot be opened, mode and times of files of the same user, or the number of
bytes and files written.
"""

from __future__ import annotations

import os
import struct

from sandbox.filesystem.cleanup import close_after
from sandbox.isolation.libc import check, libc

NEEDED_ABI = 6
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a folder
_DEVICE = 1 << 1 | 1 << 2 | 1 << 15  # write, read, ioctl
_ALL = (1 << 16) - 1
_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def abi() -> int:
    """Return the kernel's version of Landlock; 0 if absent."""
    return max(0, int(libc.syscall(_CREATE, None, 0, 1)))


def ruleset(work: str, readable: list[str]) -> int:
    """Returns a descriptor of rules: read the system and `readable`, do anything in `work`. Raises OSError."""
    rules = struct.pack("QQQ", _ALL, _TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
    fd = check(int(libc.syscall(_CREATE, rules, len(rules), 0)), "landlock")
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
        check(int(libc.syscall(_ADD, rules, 1, rule, 0)), f"landlock: {path}")


def restrict(rules: int) -> None:
    """Puts this process and every process it will start under the rules. Needs no_new_privs. Raises OSError."""
    check(int(libc.syscall(_RESTRICT, rules, 0)), "landlock")
