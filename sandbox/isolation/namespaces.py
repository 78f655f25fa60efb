"""A box's first steps: its work folder, and the mounts or rules that fence it in.

Each level of the host (`--level` of main.py) has its way: `ns` (user, pid, mount, ipc and network namespaces for every
box), `uid` (in a container: a fresh uid for every box), `landlock` (without namespaces: a Landlock ruleset) and `bare`
(limits only). Only the first two are strong; the host never claims more than the level it asked for.

In a container every box has a fresh uid and a file system of limited size (`Slots`). The file systems are mounted when
the container starts, one for each slot, and open only to the slot's group. A slot is used again once every process of
its last user has ended and its files are deleted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sandbox.filesystem import cleanup
from sandbox.isolation import privileges
from sandbox.isolation.libc import check, libc, write
from sandbox.protocol import framing

_UIDS = 2_000


@contextmanager
def acting_as(user: tuple[int, int] | None) -> Iterator[None]:
    """Takes another user's rights for file access. Real and saved ids stay, so that user cannot signal this process."""
    if user is None:
        yield
        return
    os.setegid(user[1])
    os.seteuid(user[0])
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def signal_user(uid: int, number: int) -> None:
    """Sends a signal to every process of a user at once, from the next higher uid, which no process has."""
    os.setresuid(uid + 1, uid, 0)
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        return
    finally:
        os.seteuid(0)
        os.setresuid(0, 0, 0)


def become(uid: int, gid: int) -> None:
    """Gives up root for good."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


class Slots:
    """Assigns a slot and a user to every box."""

    def __init__(self, folder: str, number: int, first_uid: int) -> None:
        self.base, self.first_uid = folder, first_uid
        self.free = list(range(number))
        self.taken: dict[int, tuple[int, int]] = {}
        """Number of the box → slot and uid."""
        self._used = 0
        self._cleaning: dict[int, int] = {}
        """pid → slot."""
        self._waiting: list[tuple[dict[str, Any], int]] = []

    def take(self, request: dict[str, Any], fd: int) -> bool:
        """Takes a slot for a box. Returns False if it has to wait (see `give_back`); a copy of `fd` is kept then."""
        if not self.free:
            self._waiting.append((request, os.dup(fd)))
            os.close(fd)
            return False
        # Every second uid: the one above sends the signals.
        uid = self.first_uid + 2 * (self._used % (_UIDS // 2))
        self._used += 1
        self.taken[request["id"]] = (self.free.pop(0), uid)
        return True

    def folder(self, number: int) -> str:
        """Return the file system of a box."""
        return f"{self.base}/{self.taken[number][0]}"

    def user(self, number: int) -> tuple[int, int]:
        """Return the uid and gid of a box."""
        slot, uid = self.taken[number]
        return uid, framing.FIRST_GROUP + slot

    def clean(self, number: int) -> None:
        """Kills the processes of an ended box's user, and deletes their files in a process of its own."""
        folder, user = self.folder(number), self.user(number)
        slot, uid = self.taken.pop(number)
        signal_user(uid, signal.SIGKILL)
        os.chmod(
            folder, 0o1770
        )  # as it was mounted: only its group can delete, and make, a folder there
        with acting_as(user):
            empty = cleanup.delete_empty(f"{folder}/{number}")
        if empty:
            self.free.append(slot)
            return
        pid = os.fork()
        if pid:
            self._cleaning[pid] = slot
            return
        with acting_as(user):
            for _ in range(3):
                cleanup.delete(f"{folder}/{number}")
        os._exit(0)

    def give_back(self, pid: int) -> list[tuple[dict[str, Any], int]]:
        """Gives back the slot that an ended child cleaned; returns the boxes that waited and have a slot now."""
        slot = self._cleaning.pop(pid, None)
        if slot is not None:
            self.free.append(slot)
        ready = []
        while self._waiting and self.free:
            request, fd = self._waiting.pop(0)
            self.take(request, fd)
            ready.append((request, fd))
        return ready


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
    for device in privileges.DEVICES:
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
    if privileges.landlock_abi() < privileges.NEEDED_ABI:
        raise OSError(
            95,
            f"Landlock has version {privileges.landlock_abi()} here, {privileges.NEEDED_ABI} is needed",
        )
    return privileges.landlock_rules(WORK, readable)


def enter_slot(folder: str, number: int, user: tuple[int, int]) -> None:
    """Level `uid`: makes a work folder in a file system of limited size, owned by the box's user.

    The box's init stays root, with the capabilities to signal and to become its user and no others.
    """
    global WORK
    WORK = f"{folder}/{number}"
    os.environ.update(HOME=WORK, TMPDIR=WORK + "/.tmp")
    privileges.adopt_orphans()
    with acting_as(user):
        for path in (WORK, WORK + "/.tmp", WORK + "/.shm"):
            os.mkdir(path, 0o700)
        os.chdir(WORK)
    os.chmod(folder, 0o1710)  # what the user put beside its folder would stay for the next one
