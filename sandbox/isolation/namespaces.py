"""A box's first steps: its work folder, and the mounts or rules that fence it in.

Each level of the host (`--level` of main.py) has its way: `ns` (user, pid, mount, ipc and network namespaces for every
box), `uid` (in a container: a fresh uid for every box), `landlock` (without namespaces: a Landlock ruleset) and `bare`
(limits only). Only the first two are strong; the host never claims more than the level it asked for.

In a container every box has a fresh uid and a file system of limited size (`Folders`). The file systems are mounted
when the container starts, one for each slot, and open only to the slot's group. A slot is used again once every process
of its last user has ended and its files are deleted.
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
TRIES = 10_000
"""Attempts at a folder that another box closes again and again."""


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


class Folders:
    """The work folders of boxes at levels without mount namespaces, below `base`.

    In a container there are `slots` of them, each a file system of limited size; every box has a user of its own.
    Elsewhere every box is the same user, and there is always room.
    """

    def __init__(self, base: str, slots: int, first_uid: int) -> None:
        self.base, self.slots, self.first_uid = base, slots, first_uid
        self.cleaning: dict[int, int | None] = {}
        """The processes that delete the files of an ended box → its slot, if any."""
        self._free = list(range(slots))
        self._taken: dict[int, tuple[int, int]] = {}
        """Number of the box → slot and uid."""
        self._used = 0
        self._waiting: list[tuple[dict[str, Any], int]] = []

    def take(self, request: dict[str, Any], fd: int) -> bool:
        """Takes a slot for a box. Returns False if it has to wait (see `give_back`); a copy of `fd` is kept then."""
        if not self.slots:
            return True
        if not self._free:
            self._waiting.append((request, os.dup(fd)))
            os.close(fd)
            return False
        # Every second uid: the one above sends the signals.
        uid = self.first_uid + 2 * (self._used % (_UIDS // 2))
        self._used += 1
        self._taken[request["id"]] = (self._free.pop(0), uid)
        return True

    def of(self, number: int) -> tuple[str, tuple[int, int] | None]:
        """Return the parent of a box's work folder, and the uid and gid of its own user."""
        if not self.slots:
            return self.base, None
        slot, uid = self._taken[number]
        return f"{self.base}/{slot}", (uid, framing.FIRST_GROUP + slot)

    def clean(self, number: int) -> None:
        """Kills the processes of an ended box's user, and deletes its files in a process of its own.

        Other boxes must not wait for as many files as the code could make.
        """
        folder, user = self.of(number)
        slot, _ = self._taken.pop(number, (None, 0))
        if user:
            signal_user(user[0], signal.SIGKILL)
            os.chmod(folder, 0o1770)  # as it was mounted: only its group can make and delete there
        with acting_as(user):
            empty = cleanup.delete_empty(f"{folder}/{number}")
        pid = 0 if empty else os.fork()
        if pid:
            self.cleaning[pid] = slot
        if empty and slot is not None:
            self._free.append(slot)
        if empty or pid:
            return
        with acting_as(user):
            for _ in range(3):
                cleanup.delete(f"{folder}/{number}")
        os._exit(0)

    def give_back(self, pid: int) -> list[tuple[dict[str, Any], int]]:
        """Gives back the slot that an ended child cleaned; returns the boxes that waited and have a slot now."""
        slot = self.cleaning.pop(pid, None)
        if slot is not None:
            self._free.append(slot)
        ready = []
        while self._waiting and self._free:
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


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    arguments = (
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        flags,
        data.encode(),
    )
    check(libc.mount(*arguments), f"mount {target}")


def mount_proc(options: str = "") -> None:
    """Mounts a /proc of the current pid namespace."""
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, options)


def enter_namespaces(limits: dict[str, Any], uid: int, gid: int) -> None:
    """Level `ns`: maps the user, mounts an empty work folder of limited size and a /proc of the box's own."""
    privileges.set_dumpable(True)  # else the files under /proc/self belong to root
    write("/proc/self/setgroups", "deny")
    write("/proc/self/gid_map", f"1000 {gid} 1")
    write("/proc/self/uid_map", f"1000 {uid} 1")
    _mount("none", "/", None, _REC | _PRIVATE)
    size = f"size={limits['disk_mb']}m,nr_inodes={limits['inodes'] + 3},mode=0755"
    _mount("tmpfs", WORK, "tmpfs", _NOSUID | _NODEV, size)
    # Only processes: counts of the machine's threads, forks and pages show other boxes' activity.
    mount_proc("subset=pid")
    # The host's devices read-only: they can still be written to, and their times and attributes stay.
    for device in privileges.DEVICES:
        kept = os.statvfs(device).f_flag & (_NOSUID | _NODEV | _NOEXEC)
        _mount("none", device, None, _REMOUNT | _BIND | _RDONLY | kept)
    # /tmp and /dev/shm are links to these: one budget for everything a box writes.
    os.mkdir(WORK + "/.tmp")
    os.mkdir(WORK + "/.shm")
    os.chdir(WORK)


def _enter_work(folder: str, opens: bool) -> None:
    """Makes WORK and goes into it. Landlock does not protect modes: the code of another box may close its folder."""
    made = False
    for left in range(TRIES, 0, -1):
        try:
            if opens:
                os.chmod(folder, 0o700)
            if not made:
                os.mkdir(WORK, 0o700)
            made = True
            return os.chdir(WORK)
        except PermissionError:
            if left == 1:
                raise


def enter_folder(
    folder: str, number: int, level: str, user: tuple[int, int] | None, readable: list[str]
) -> int | None:
    """Other levels: makes a work folder in `folder`; returns the descriptor of the rules at level `landlock`.

    At level `uid` it is the user's; the box's init stays root, with the capabilities to signal and to become that user
    and no others. Raises OSError, also if the kernel's Landlock is too old.
    """
    global WORK
    WORK = f"{folder}/{number}"
    os.environ.update(HOME=WORK, TMPDIR=WORK + "/.tmp")
    privileges.adopt_orphans()
    with acting_as(user):
        _enter_work(folder, user is None)
        for path in (".tmp", ".shm"):
            os.mkdir(path, 0o700)
    if user:
        os.chmod(folder, 0o1710)  # what the user put beside its folder would stay for the next one
    # By the current folder: a path could be closed again in between, and a rule that is not made is not missed.
    return privileges.landlock_rules(".", readable) if level == "landlock" else None
