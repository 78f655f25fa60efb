"""Images in a terminal: two pixels a cell, as half blocks; and the program that opens an image's file."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

SMALL = (32, 8)
"""Cells and lines of an image in the transcript."""


@lru_cache(maxsize=64)
def picture_rows(data: bytes, width: int, height: int) -> tuple[tuple[Segment, ...], ...]:
    """Return an image as lines of half blocks, in at most so many cells and lines; else a line with the reason."""
    try:
        from PIL import Image
    except ImportError:
        return ((Segment("  pip install 'agentrl-cli[vision]' shows images here"),),)
    try:
        with Image.open(io.BytesIO(data)) as opened:
            scale = min(width / opened.width, 2 * height / opened.height, 1.0)
            size = max(1, round(opened.width * scale)), max(2, 2 * round(opened.height * scale / 2))
            image = opened.convert("RGB").resize(size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return ((Segment(f"  the image cannot be shown: {error}"),),)
    rows = [[tuple(pixel) for pixel in row] for row in np.asarray(image).tolist()]
    pairs = [list(zip(*two, strict=True)) for two in zip(rows[::2], rows[1::2], strict=True)]
    if "NO_COLOR" in os.environ:
        shades = " ░▒▓█"
        return tuple(
            (Segment("".join(shades[(sum(a) + sum(b)) * 4 // 1530] for a, b in row)),)
            for row in pairs
        )
    return tuple(tuple(Segment("▀", _style(*pair)) for pair in row) for row in pairs)


@lru_cache(maxsize=4096)
def _style(above: tuple[int, int, int], below: tuple[int, int, int]) -> Style:
    return Style(
        color="#{:02x}{:02x}{:02x}".format(*above), bgcolor="#{:02x}{:02x}{:02x}".format(*below)
    )


def picture_lines(data: bytes, width: int, height: int) -> list[Text]:
    """Return `picture_rows` as texts."""
    rows = picture_rows(data, width, height)
    return [
        Text.assemble(*((part.text, part.style or "") for part in row), no_wrap=True)
        for row in rows
    ]


def open_file(path: Path) -> str:
    """Open a file in the desktop's program for it. Returns a message for the user if there is none, else ''."""
    mac = sys.platform == "darwin"
    openers = ("open",) if mac else ("xdg-open", "wslview")
    program = next(filter(None, map(shutil.which, openers)), None)
    names = ("DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME")
    desktop = mac or any(os.environ.get(name) for name in names)
    if program is None or not desktop:
        return f"no program here shows images; the file is {path}"
    quiet = subprocess.DEVNULL
    subprocess.Popen(
        [program, str(path)], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    return ""
