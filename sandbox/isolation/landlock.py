"""Landlock: what code may touch without namespaces. Needs ABI 6 (Linux 6.12), which also scopes signals.

It does not cover stat() of files that cannot be opened, mode and times of files of the same user, or the number of
bytes and files written.
"""

from __future__ import annotations

import ctypes
import os
import struct

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


def abi(libc: ctypes.CDLL) -> int:
    """Return the kernel's version of Landlock; 0 if absent."""
    return max(0, int(libc.syscall(_CREATE, None, 0, 1)))


def ruleset(libc: ctypes.CDLL, work: str, readable: list[str]) -> int:
    """Returns a descriptor of rules: read the system and `readable`, do anything in `work`. Raises OSError."""
    rules = struct.pack("QQQ", _ALL, _TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
    fd = int(libc.syscall(_CREATE, rules, len(rules), 0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "landlock: " + os.strerror(ctypes.get_errno()))
    for paths, rights in (((*_SYSTEM, *readable), _READ), (DEVICES, _DEVICE), ((work,), _ALL)):
        for path in paths:
            _allow(libc, fd, path, rights)
    return fd


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # absent: nothing to allow
    try:
        if not os.path.isdir(path):
            rights &= 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
        if libc.syscall(_ADD, rules, 1, struct.pack("=Qi", rights, beneath), 0) != 0:
            raise OSError(
                ctypes.get_errno(), f"landlock: {path}: " + os.strerror(ctypes.get_errno())
            )
    finally:
        os.close(beneath)


def restrict(libc: ctypes.CDLL, rules: int) -> None:
    """Puts this process and every process it will start under the rules. Needs no_new_privs. Raises OSError."""
    if libc.syscall(_RESTRICT, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock: " + os.strerror(ctypes.get_errno()))
