"""Images outside of the store: a line that names one, a file to open, and a short text for its many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from agentrl_cli.types.content import digest, media_type

RUN = 8
"""This many equal control tokens in a row are an image's, and shortened."""


def image_file(folder: Path, data: bytes) -> Path | None:
    """Return the image as a file in a folder, named by its hash, written if absent; None if it cannot be written."""
    path = folder / f"{digest(data)}.{media_type(data).partition('/')[2]}"
    part = path.with_name(f".{path.name}.part")
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
    except OSError:
        return None
    return path


def image_line(data: bytes, size: str = "", folder: Path | None = None) -> str:
    """Return `image 24x16  83 bytes  sha256 9f86d081…`, and the file to open if a folder is given."""
    path = image_file(folder, data) if folder is not None else None
    parts = [f"image {size}".rstrip(), f"{len(data)} bytes", f"sha256 {digest(data)[:8]}…"]
    return "  ".join([*parts, *([str(path)] if path is not None else [])])


def short_runs(texts: Sequence[str], ids: Sequence[int]) -> list[str]:
    """Return texts of tokens; an image's placeholders after the first are a small square each."""
    out = list(texts)
    for _, run in groupby(range(len(out)), key=lambda at: ids[at]):
        first, *others = run
        if len(others) + 1 >= RUN and out[first].startswith("<|"):
            out[first + 1 : first + 1 + len(others)] = ["▪"] * len(others)
    return out
