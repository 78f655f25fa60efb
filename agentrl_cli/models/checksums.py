"""Checksums of a folder's files, so that a torn or changed model folder or checkpoint is found before it is used.

`checksums.json` lists the size and the SHA-256 of every file: {"files": {name: {"bytes": n, "sha256": hex}}}. Folders
that older versions wrote have none, and neither have models from elsewhere: those are loaded without this check.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums.json"
FREE = frozenset({CHECKSUMS, "README.md"})
"""Files without a checksum: people edit a model card."""


def seal(folder: Path) -> None:
    """Write the checksums of a finished folder, and everything in it to the disk. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {
        path.relative_to(folder).as_posix(): _facts(path) for path in files if path.name not in FREE
    }
    manifest = folder / CHECKSUMS
    manifest.write_text(json.dumps({"files": sums}, indent=1) + "\n", encoding="utf-8")
    for path in (*files, manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        to_disk(path)


def to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, have reached the disk. Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def damage(folder: Path, *, skip: Collection[str] = ()) -> str:
    """Return the fault of a folder by its checksums, in words; empty if it has none, or no checksums."""
    manifest = folder / CHECKSUMS
    while manifest.exists():
        written = _when_written(manifest)
        why = _damage(folder, manifest, skip)
        if not why or _when_written(manifest) == written:
            return why  # else a training has put a newer checkpoint in this place meanwhile
    return ""


def _when_written(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _damage(folder: Path, manifest: Path, skip: Collection[str]) -> str:
    try:
        files = json.loads(manifest.read_bytes())["files"]
        for name, facts in files.items():
            why = "" if name in skip else _differs(folder / name, facts)
            if why:
                return f"{name} {why}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read ({type(error).__name__})"
    return ""


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _differs(path: Path, facts: Any) -> str:
    """Return how a file differs from its checksum. The size comes first: it costs nothing."""
    size = path.stat().st_size
    if size != facts["bytes"]:
        return f"has {size:,} of {facts['bytes']:,} bytes"
    return "" if _facts(path)["sha256"] == facts["sha256"] else "has changed since it was written"
