"""Folders that code has filled: opened without following links, and deleted however deep or closed they are.

The host loads this file too, by path, so it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator

_LONGEST = 60.0
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def close_after(fd: int) -> Iterator[int]:
    """Closes a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_folder(folder: int | None, name: str) -> int:
    """Return a descriptor of a folder, which is made accessible to its owner if needed."""
    try:
        return os.open(name, FOLDER, dir_fd=folder)
    except PermissionError:
        path = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
        with close_after(os.open(name, path, dir_fd=folder)) as fd:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
        return os.open(name, FOLDER, dir_fd=folder)


def delete_empty(path: str) -> bool:
    """Deletes a work folder if it is empty; returns whether there is none now."""
    with contextlib.suppress(OSError):
        for folder in (path + "/.tmp", path + "/.shm", path):
            os.rmdir(folder)
    return not os.path.lexists(path)


def delete(path: str) -> None:
    """Deletes a folder and its content within a minute, as far as possible.

    Nested folders are moved up beside each other first, so that neither path length nor depth matters.
    """
    try:
        top = open_folder(None, path)
    except OSError:
        return
    prefix, number = os.urandom(8).hex(), 0
    end = time.monotonic() + _LONGEST  # other processes may keep filling it
    with contextlib.suppress(OSError):
        with close_after(top):
            while (found := _flatten(top, prefix, number)) and time.monotonic() < end:
                number += found
        os.rmdir(path)


def _flatten(top: int, prefix: str, number: int) -> int:
    """Deletes the files of a folder and of its folders, and moves the folders below those up. Returns how many."""
    start = number
    for name in _delete_files(top):
        with contextlib.suppress(OSError):
            with close_after(open_folder(top, name)) as below:
                for inner in _delete_files(below):
                    with contextlib.suppress(OSError):
                        os.close(
                            open_folder(below, inner)
                        )  # moving a folder needs the right to write into it
                        os.rename(inner, f"{prefix}{number}", src_dir_fd=below, dst_dir_fd=top)
                        number += 1
            os.rmdir(name, dir_fd=top)
    return number - start


def _delete_files(folder: int) -> list[str]:
    """Deletes the files in a folder; returns the names of its folders."""
    with contextlib.suppress(OSError):
        if os.fstat(folder).st_mode & 0o700 != 0o700:
            os.fchmod(folder, 0o700)
    folders: list[str] = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                folders.append(name)
            else:
                os.unlink(name, dir_fd=folder)
    return folders
