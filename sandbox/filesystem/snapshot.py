"""The files of a work folder at one moment, so that they can be put back together with the variables.

Taking one costs a stat of every file and a copy of those that changed since the last one. Everything is reached by
descriptors from the folder on and never through a link, because without namespaces the box itself could follow one.
A folder that cannot be kept (sparse files beyond its limit, too deep, closed to its owner) has no snapshot, and the
result of an execution reports that.
"""

from __future__ import annotations

import os
import stat
import time
from typing import IO, NamedTuple

from sandbox.filesystem.cleanup import FOLDER, close_after, open_folder
from sandbox.isolation import namespaces

_DEPTH = 60
_LONGEST = 3.0
"""Seconds to restore a folder, less than the host waits for an answer: the code may have filled it with anything."""
_FIRST = 3
"""Folders in a fresh box: the work folder, and those of /tmp and /dev/shm."""
_SAME_TYPE = (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO)


class Unkeepable(Exception):
    """A folder that cannot be kept."""


class Memory:
    """Contents of files one after the other, in a memory file: a fork copies no page tables for it."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None  # closed with the last snapshot that holds it
        self.size = 0

    @property
    def _fd(self) -> int:
        if self._file is None:
            self._file = open(os.memfd_create("files"), "r+b", buffering=0)  # noqa: SIM115 - see above
        return self._file.fileno()

    def add(self, source: int, size: int) -> int:
        """Copies an open file; returns its offset."""
        start = self.size
        while self.size < start + size:
            sent = os.sendfile(self._fd, source, self.size - start, start + size - self.size)
            if sent == 0:
                raise Unkeepable("a file became shorter")
            self.size += sent
        return start

    def copy(self, start: int, size: int, target: int) -> None:
        """Writes bytes that `add` copied to a file."""
        end = start + size
        while start < end:
            start += os.sendfile(target, self._fd, start, end - start)


class Item(NamedTuple):
    """One entry of the folder; `key` changes whenever the entry does."""

    mode: int
    key: tuple[int, ...]
    times: tuple[int, int]
    memory: Memory | None = None
    start: int = 0
    target: str = ""
    """Target of a link."""


Snapshot = dict[str, Item]


class Files:
    """Takes and restores snapshots of one box's work folder. `limit`: bytes that its files may have; `most`: files."""

    def __init__(self, limit: int, most: int, user: tuple[int, int] | None) -> None:
        self.limit, self.most, self.user = limit, most + _FIRST, user
        self._last: Snapshot = {}

    def take(self) -> Snapshot | None:
        """Return a snapshot of the current content; None if it cannot be kept."""
        found: Snapshot = {}
        try:
            with (
                namespaces.acting_as(self.user),
                close_after(os.open(namespaces.WORK, FOLDER)) as root,
            ):
                found[""] = _item(os.fstat(root))
                self._scan(root, "", found, Memory(), 0)
        except (Unkeepable, OSError):
            self._last = {}
            return None
        self._last = found
        return found

    def _scan(self, folder: int, prefix: str, found: Snapshot, memory: Memory, size: int) -> int:
        """Adds the entries of a folder and below. Returns the bytes of all files so far."""
        if prefix.count("/") > _DEPTH:
            raise Unkeepable("too deep")
        with os.scandir(folder) as scan:
            for entry in scan:
                info = entry.stat(follow_symlinks=False)
                if len(found) >= self.most:
                    raise Unkeepable("too many files")
                path, kind = prefix + entry.name, stat.S_IFMT(info.st_mode)
                if kind not in _SAME_TYPE:
                    continue  # a socket: its server has ended
                found[path] = item = _item(info)
                if kind == stat.S_IFDIR:
                    with close_after(os.open(entry.name, FOLDER, dir_fd=folder)) as below:
                        size = self._scan(below, path + "/", found, memory, size)
                    continue
                size += info.st_size
                if size > self.limit:
                    raise Unkeepable("too large")
                before = self._last.get(path)
                if before is not None and before.key == item.key:
                    found[path] = before
                elif kind == stat.S_IFREG:
                    found[path] = _read(folder, entry.name, item, memory)
                elif kind == stat.S_IFLNK:
                    found[path] = item._replace(target=os.readlink(entry.name, dir_fd=folder))
        return size

    def restore(self, wanted: Snapshot | None) -> str:
        """Restores the folder. Returns `restored`, `left` if that failed, or an empty string if nothing had changed."""
        if wanted is None:
            return "left"
        try:
            with (
                namespaces.acting_as(self.user),
                close_after(open_folder(None, namespaces.WORK)) as root,
            ):
                changed = _clear(root, "", wanted, time.monotonic() + _LONGEST)
                made = _make(root, wanted)
        except (Unkeepable, OSError):
            self._last = {}
            return "left"
        self._last = {**wanted, **made}
        return "restored" if changed or made else ""


def add_sizes(snapshots: list[Snapshot | None]) -> int:
    """Return the bytes of memory that snapshots hold together."""
    memories = {item.memory for one in snapshots if one for item in one.values() if item.memory}
    return sum(memory.size for memory in memories)


def _item(info: os.stat_result) -> Item:
    key = info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
    return Item(info.st_mode, key, (info.st_atime_ns, info.st_mtime_ns))


def _read(folder: int, name: str, item: Item, memory: Memory) -> Item:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with close_after(os.open(name, flags, dir_fd=folder)) as fd:
        return item._replace(memory=memory, start=memory.add(fd, item.key[2]))


def _clear(folder: int, prefix: str, wanted: Snapshot, end: float, depth: int = 0) -> bool:
    """Deletes entries that are not wanted or have changed; returns whether there were any.

    `end`: when to give up, by the monotonic clock. Raises Unkeepable.
    """
    if depth > _DEPTH:
        raise Unkeepable("too deep")
    changed = False
    if os.fstat(folder).st_mode & 0o300 != 0o300:
        os.fchmod(folder, 0o700)
    with os.scandir(folder) as scan:
        entries = [(entry.name, entry.stat(follow_symlinks=False)) for entry in scan]
    for name, info in entries:
        if time.monotonic() > end:
            raise Unkeepable("too much to delete")
        item = wanted.get(prefix + name)
        if stat.S_ISDIR(info.st_mode):
            with close_after(open_folder(folder, name)) as below:
                changed |= _clear(below, f"{prefix}{name}/", wanted, end, depth + 1)
            if item is None or not stat.S_ISDIR(item.mode):
                os.rmdir(name, dir_fd=folder)
                changed = True
        elif item is None or item.key != _item(info).key:
            os.unlink(name, dir_fd=folder)
            changed = True
    return changed


def _make(root: int, wanted: Snapshot) -> Snapshot:
    """Makes the missing entries, parents first, then sets the modes of the folders. Returns the new entries."""
    made: Snapshot = {}
    folders: list[tuple[str, Item]] = []
    hard: dict[int, str] = {}
    for path in sorted(wanted):
        item = wanted[path]
        if stat.S_ISDIR(item.mode):
            folders.append((path, item))
        if path and (new := _make_one(root, path, item, hard)) is not None:
            made[path] = new
    for path, item in reversed(folders):
        fd, name = _parent(root, path) if path else (os.dup(root), ".")
        with close_after(fd), close_after(open_folder(fd, name)) as below:
            os.utime(below, ns=item.times)
            os.fchmod(below, stat.S_IMODE(item.mode))
    return made


def _make_one(root: int, path: str, item: Item, hard: dict[int, str]) -> Item | None:
    """Makes one entry if it is missing. Names of one file become hard links again."""
    folder, name = _parent(root, path)
    try:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            return None
        except FileNotFoundError:
            pass
        kind, inode = stat.S_IFMT(item.mode), item.key[1]
        if kind == stat.S_IFDIR:
            os.mkdir(name, 0o700, dir_fd=folder)
        elif inode in hard:
            os.link(hard[inode], name, src_dir_fd=root, dst_dir_fd=folder, follow_symlinks=False)
        elif kind == stat.S_IFLNK:
            os.symlink(item.target, name, dir_fd=folder)
        elif kind == stat.S_IFIFO:
            os.mkfifo(name, stat.S_IMODE(item.mode), dir_fd=folder)
        else:
            _write(folder, name, item)
        if kind != stat.S_IFDIR:
            hard.setdefault(inode, path)
            os.utime(name, ns=item.times, dir_fd=folder, follow_symlinks=False)
        new = _item(os.stat(name, dir_fd=folder, follow_symlinks=False))
        return new._replace(memory=item.memory, start=item.start, target=item.target)
    finally:
        os.close(folder)


def _write(folder: int, name: str, item: Item) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with close_after(os.open(name, flags, 0o600, dir_fd=folder)) as fd:
        if item.memory is not None:
            item.memory.copy(item.start, item.key[2], fd)
        os.fchmod(fd, stat.S_IMODE(item.mode))


def _parent(root: int, path: str) -> tuple[int, str]:
    """Return a descriptor of the parent folder, without following links, and the last part of the path."""
    *above, name = path.split("/")
    folder = os.dup(root)
    for part in above:
        with close_after(folder):
            folder = open_folder(folder, part)
    return folder, name
