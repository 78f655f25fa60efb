"""A box's first steps: its work folder, and the mounts or rules that fence it in.

Each level of the host (`--level` of main.py) has its way: `ns` (user, pid, mount, ipc and network namespaces for every
box), `uid` (in a container: a fresh uid for every box), `landlock` (without namespaces: a Landlock ruleset) and `bare`
(limits only). Only the first two are strong; the host never claims more than the level it asked for.
"""

from __future__ import annotations

import os
from typing import Any

from sandbox.isolation import landlock, privileges, users
from sandbox.isolation.libc import check, libc, write

WORK = "/work"
"""The work folder of this box."""
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)


loadavg = -1
"""Descriptor of /proc/loadavg at level `ns`, which names the process id given out last in this box."""


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    arguments = (
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        flags,
        data.encode(),
    )
    check(libc.mount(*arguments), f"mount {target}")


def mount_proc() -> None:
    """Mounts a /proc of the current pid namespace."""
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def _hide_counts() -> None:
    """Leaves only processes in /proc: counts of the machine's threads, forks and pages show other boxes' activity."""
    global loadavg
    loadavg = os.open("/proc/loadavg", os.O_RDONLY)
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, "subset=pid")


def _protect_devices() -> None:
    """Mounts the host's devices read-only: they can still be written to, and their times and attributes stay."""
    for device in landlock.DEVICES:
        kept = os.statvfs(device).f_flag & (_NOSUID | _NODEV | _NOEXEC)
        _mount("none", device, None, _REMOUNT | _BIND | _RDONLY | kept)


def enter_namespaces(limits: dict[str, Any], uid: int, gid: int) -> None:
    """Level `ns`: maps the user, mounts an empty work folder of limited size and a /proc of the box's own."""
    privileges.set_dumpable(True)  # else the files under /proc/self belong to root
    write("/proc/self/setgroups", "deny")
    write("/proc/self/gid_map", f"1000 {gid} 1")
    write("/proc/self/uid_map", f"1000 {uid} 1")
    _mount("none", "/", None, _REC | _PRIVATE)
    size = f"size={limits['disk_mb']}m,nr_inodes={limits['inodes'] + 3},mode=0755"
    _mount("tmpfs", WORK, "tmpfs", _NOSUID | _NODEV, size)
    mount_proc()
    _hide_counts()
    _protect_devices()
    # /tmp and /dev/shm are links to these: one budget for everything a box writes.
    os.mkdir(WORK + "/.tmp")
    os.mkdir(WORK + "/.shm")


def enter_folder(base: str, number: int, level: str, readable: list[str]) -> int | None:
    """Levels `landlock` and `bare`: makes a work folder under `base`; returns the descriptor of the Landlock rules.

    Raises OSError, also if the kernel's Landlock is too old.
    """
    global WORK
    WORK = f"{base}/{number}"
    os.chmod(
        base, 0o700
    )  # Landlock does not protect modes: the code of another box may have closed it
    for folder in (WORK, WORK + "/.tmp", WORK + "/.shm"):
        os.mkdir(folder, 0o700)
    os.environ.update(HOME=WORK, TMPDIR=WORK + "/.tmp")
    privileges.adopt_orphans()
    if level == "bare":
        return None
    if level != "landlock":
        raise ValueError(f"unknown level {level!r}")
    if landlock.abi() < landlock.NEEDED_ABI:
        raise OSError(
            95, f"Landlock has version {landlock.abi()} here, {landlock.NEEDED_ABI} is needed"
        )
    return landlock.ruleset(WORK, readable)


def enter_slot(folder: str, number: int, user: tuple[int, int]) -> None:
    """Level `uid`: makes a work folder in a file system of limited size, owned by the box's user.

    The box's init stays root, with the capabilities to signal and to become its user and no others.
    """
    global WORK
    WORK = f"{folder}/{number}"
    os.environ.update(HOME=WORK, TMPDIR=WORK + "/.tmp")
    privileges.adopt_orphans()
    with users.acting_as(user):
        for path in (WORK, WORK + "/.tmp", WORK + "/.shm"):
            os.mkdir(path, 0o700)
        os.chdir(WORK)
    os.chmod(folder, 0o1710)  # what the user put beside its folder would stay for the next one
