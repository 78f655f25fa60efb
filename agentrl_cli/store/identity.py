"""Whether the files that a connection has open are those at their path: SQLite itself does not look.

If a store is deleted or replaced under a writer, every further commit goes into a file without a name, and is lost when
the process ends. The log beside it (`-wal`) holds what is not in the file itself yet, and without its index (`-shm`)
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
        """Raise StoreError if one of the files is gone or another one; those of the log are learned as they appear."""
        for suffix in _SUFFIXES:
            now = _identity(f"{self.path}{suffix}")
            if self._known.get(suffix, now) != now:
                raise StoreError(
                    f"The store was {'deleted' if now is None else 'replaced'} while it was in use:"
                    f" {self.path}{suffix}. What was to be written now is lost.",
                    hint="Put it back, from a backup if need be, then `agentrl train --resume last` goes on.",
                )
            if now is not None:
                self._known[suffix] = now

    @property
    def has_lost_its_log(self) -> bool:
        """Whether the file is there and its log is not: then the log, still open, can be written back into the file."""
        log = f"{self.path}-wal"
        return self._known[""] == _identity(self.path) and "-wal" in self._known and _identity(log) is None


def _identity(path: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
