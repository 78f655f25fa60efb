"""Files in and out of the work folder: never through a link, regular files only, sizes limited."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from sandbox import exit_status
from sandbox.filesystem.cleanup import FOLDER, close_after
from sandbox.isolation import namespaces

MAX_FILE = 16 << 20
_DEEPEST = 200
"""Levels of nested folders whose content is counted."""
_HIDDEN = {".tmp", ".shm"}
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
_MESSAGES = {
    errno.ENOENT: "there is no such file",
    errno.ELOOP: "it is a link, and links are not followed",
    errno.ENOTDIR: "a part of the path is not a folder (links are not followed)",
    errno.EISDIR: "it is a folder",
}


class Refused(Exception):
    """A path outside the work folder, or a file that cannot be read."""


def handle(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Answers `read`, `write` and `list`."""
    op = header["op"]
    try:
        if op == "read":
            return {"status": "ok"}, read(header["path"])
        if op == "write":
            write(header["path"], body)
            return {"status": "ok"}, b""
        if op == "list":
            found, cut = entries()
            return {"status": "ok", "cut": cut}, json.dumps(found).encode()
    except Refused as error:
        return {"status": "refused", "detail": str(error)}, b""
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return {"status": "disk_limit", "detail": str(error)}, b""
        return {
            "status": "refused",
            "detail": _MESSAGES.get(error.errno or 0) or os.strerror(error.errno or 0),
        }, b""
    return {"status": "refused", "detail": f"unknown operation {op!r}"}, b""


def _parent(path: str, make: bool) -> tuple[int, str]:
    """Return a descriptor of the folder of `path`, reached without following a link, and the last part."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path or path.startswith("/"):
        raise Refused("the path has to be relative and inside the work folder")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # half of a pair of code units, which JSON can hold
        raise Refused("the path is not valid Unicode") from None
    folder = os.open(namespaces.WORK, os.O_RDONLY | os.O_DIRECTORY)
    # Step by step from the folder above: a path as a whole would follow a link that the code puts in between.
    for part in parts[:-1]:
        with close_after(folder):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=folder)
            folder = os.open(part, FOLDER, dir_fd=folder)
    return folder, parts[-1]


def read(path: str) -> bytes:
    """Return the bytes of a regular file of at most 16 MiB."""
    folder, name = _parent(path, make=False)
    with close_after(folder):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("not a regular file")
        if found.st_size > MAX_FILE:
            raise Refused(f"larger than {MAX_FILE >> 20} MiB")
        return file.read(MAX_FILE)


def write(path: str, data: bytes) -> None:
    """Writes a file and the folders above it; a link of that name is replaced, not followed.

    The new file has the permissions of a regular file that it replaces.
    """
    folder, name = _parent(path, make=True)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        mode = 0o644
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            mode = stat.S_IMODE(found.st_mode) & 0o777 if stat.S_ISREG(found.st_mode) else mode
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            flags |= os.O_TRUNC  # nothing to replace
        with open(os.open(name, flags, 0o644, dir_fd=folder), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
    except OSError:
        if flags & os.O_EXCL and _exists(name, folder):
            os.unlink(name, dir_fd=folder)  # half a file is worse than none
        raise
    finally:
        os.close(folder)


def _exists(name: str, folder: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def entries(limit: int = 1000) -> tuple[list[list[Any]], bool]:
    """Return `[path, kind, size]` of the work folder's entries, sorted, at most `limit`, and whether there are more.

    Links are not followed.
    """
    found: list[list[Any]] = []
    stack = [""]
    while stack:
        below = stack.pop()
        try:
            scan = os.scandir(os.path.join(namespaces.WORK, below))
        except OSError:
            continue  # the code closed or deleted it; it is listed itself
        with scan:
            for entry in scan:
                path = f"{below}/{entry.name}" if below else entry.name
                if path in _HIDDEN:
                    continue
                if len(found) == limit:
                    return sorted(found), True
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # its path is too long
                kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
                found.append([path.encode("utf-8", "replace").decode(), kind, info.st_size])
                if kind == "folder":
                    stack.append(path)
    return sorted(found), False


def too_full(limits: dict[str, Any], pids: Iterable[int]) -> str:
    """Return the limit that a work folder exceeds (`disk_mb`, `inodes`), for levels without a file system of its own.

    Returns an empty string if there is none. Folders and links count as files, and counting stops at
    the limit. Files without a name count as long as one of the box's processes `pids` has them open.
    """
    nameless = _nameless(pids)
    size, number = sum(nameless.values()), len(nameless) - len(_HIDDEN)
    stack = [namespaces.WORK]
    while stack:
        folder = stack.pop()
        if folder.count("/") > _DEEPEST:
            return exit_status.MANY  # nothing below that can be counted now
        try:
            with os.scandir(folder) as scan:
                for entry in scan:
                    number += 1
                    if number > limits["inodes"]:
                        return exit_status.MANY
                    with suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            stack.append(entry.path)
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if size > limits["disk_mb"] << 20:
                        return exit_status.FULL
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return exit_status.MANY
    return ""


def _nameless(pids: Iterable[int]) -> dict[int, int]:
    """Bytes on disk, by inode, of the deleted files that processes still have open."""
    found: dict[int, int] = {}
    try:
        device = os.stat(namespaces.WORK).st_dev
    except OSError:
        return found
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        with suppress(OSError):  # the process has ended
            for fd in os.listdir(folder):
                with suppress(OSError):
                    info = os.stat(f"{folder}/{fd}")
                    if info.st_nlink == 0 and info.st_dev == device and stat.S_ISREG(info.st_mode):
                        found[info.st_ino] = info.st_blocks * 512
    return found
