"""Check that a connection's open files are those at its path: SQLite does not check.

If a store is deleted or replaced under a writer, every further commit goes into a file without a name, and is lost when
the process ends. The log beside it (`-wal`) holds commits that are not in the file yet, and without its index (`-shm`)
other processes do not see this one's locks, so both count as much as the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from agentrl_cli.errors import StoreError

_SUFFIXES = ("", "-wal", "-shm")


class Identity:
    """The files of one open store, by device and inode."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()  # the process may change its folder
        self._known: dict[str, tuple[int, int]] = {}
        self.require()

    def require(self) -> None:
        """Raise StoreError if a file was deleted or replaced; log files are recorded when they appear."""
        for suffix in _SUFFIXES:
            now = _identity(f"{self.path}{suffix}")
            if self._known.get(suffix, now) != now:
                raise StoreError(
                    f"The store was {'deleted' if now is None else 'replaced'} while it was in use:"
                    f" {self.path}{suffix}. What was being written is lost.",
                    hint="Put it back, from a backup if need be, then `agentrl train --resume last` continues.",
                )
            if now is not None:
                self._known[suffix] = now

    @property
    def has_lost_its_log(self) -> bool:
        """Whether only the log is missing: it is still open and can be written back into the file."""
        log = f"{self.path}-wal"
        return (
            self._known[""] == _identity(self.path)
            and "-wal" in self._known
            and _identity(log) is None
        )


def _identity(path: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
