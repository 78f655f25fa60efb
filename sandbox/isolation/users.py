"""Boxes with users of their own: in a container every box has a fresh uid and a file system of limited size.

The file systems are mounted when the container starts, one for each slot, and open only to the slot's group. A slot is
used again once every process of its last user has ended and its files are deleted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sandbox.filesystem import cleanup
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
