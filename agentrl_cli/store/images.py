"""Images of episodes for people: a line that names one, a file that opens, a text that stands for its many tokens."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from agentrl_cli.types.content import media_type

RUN = 8
"""So many of the same control token in a row are an image's, and shown short."""
PATCH = "▪"


def image_file(folder: Path, data: bytes) -> Path | None:
    """The image as a file in a folder, by its hash, written where it is not there yet; None where it cannot be."""
    path = folder / f"{hashlib.sha256(data).hexdigest()}.{media_type(data).partition('/')[2]}"
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
    """`image 24x16  83 bytes  sha256 9f86d081…`, and the file to open where a folder for it is given."""
    path = image_file(folder, data) if folder is not None else None
    parts = [f"image {size}".rstrip(), f"{len(data)} bytes", f"sha256 {hashlib.sha256(data).hexdigest()[:8]}…"]
    return "  ".join([*parts, *([str(path)] if path is not None else [])])


def data_uri(data: bytes) -> str:
    """The image as an address that holds it."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def short_runs(texts: Sequence[str], ids: Sequence[int]) -> list[str]:
    """Texts of tokens, those of an image's placeholder after its first one as a small square."""
    out = list(texts)
    start = 0
    for at in range(1, len(out) + 1):
        if at < len(out) and ids[at] == ids[start]:
            continue
        if at - start >= RUN and out[start].startswith("<|"):
            out[start + 1 : at] = [PATCH] * (at - start - 1)
        start = at
    return out
