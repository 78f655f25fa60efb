"""Boxes told apart by user: in a container every box has a fresh uid and a file system of limited size.

The file systems are mounted when the container starts, one for each slot, and open only to the slot's group. A slot is
used again once everything of its last user is dead and deleted.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import confine
import folders
import wire

_UIDS = 2_000


class Slots:
    """Which box has which slot and which user."""

    def __init__(self, folder: str, number: int, first_uid: int) -> None:
        self.base, self.first_uid = folder, first_uid
        self.free = list(range(number))
        self.taken: dict[int, tuple[int, int]] = {}
        """number of the box → slot and uid"""
        self._used = 0
        self._cleaning: dict[int, int] = {}
        """pid → slot"""
        self._waiting: list[tuple[dict[str, Any], int]] = []

    def take(self, request: dict[str, Any], fd: int) -> bool:
        """A slot for a box; False where it has to wait for one (see `freed`), which keeps a copy of `fd`."""
        if not self.free:
            self._waiting.append((request, os.dup(fd)))
            os.close(fd)
            return False
        # Every second uid: the one above is for the sweep.
        uid = self.first_uid + 2 * (self._used % (_UIDS // 2))
        self._used += 1
        self.taken[request["id"]] = (self.free.pop(0), uid)
        return True

    def folder(self, number: int) -> str:
        """The file system of a box."""
        return f"{self.base}/{self.taken[number][0]}"

    def user(self, number: int) -> tuple[int, int]:
        """uid and gid of a box."""
        slot, uid = self.taken[number]
        return uid, wire.FIRST_GROUP + slot

    def clean(self, number: int) -> None:
        """A box ended: ends its user's processes, and deletes in a process of its own what they left."""
        folder, user = self.folder(number), self.user(number)
        slot, uid = self.taken.pop(number)
        confine.signal_user(uid, signal.SIGKILL)
        os.chmod(folder, 0o1770)  # as it was mounted: only its group can delete, and make, a folder there
        with confine.acting_as(user):
            empty = _delete_empty(f"{folder}/{number}")
        if empty:
            self.free.append(slot)
            return
        pid = os.fork()
        if pid:
            self._cleaning[pid] = slot
            return
        with confine.acting_as(user):
            for _ in range(3):
                folders.delete(f"{folder}/{number}")
        os._exit(0)

    def freed(self, pid: int) -> list[tuple[dict[str, Any], int]]:
        """A child ended; returns the boxes that waited and have a slot now."""
        slot = self._cleaning.pop(pid, None)
        if slot is not None:
            self.free.append(slot)
        ready = []
        while self._waiting and self.free:
            request, fd = self._waiting.pop(0)
            self.take(request, fd)
            ready.append((request, fd))
        return ready


def _delete_empty(path: str) -> bool:
    """Deletes a work folder in which nothing was left; whether it was such a one."""
    try:
        for folder in (path + "/.tmp", path + "/.shm", path):
            os.rmdir(folder)
    except OSError:
        return False
    return True
