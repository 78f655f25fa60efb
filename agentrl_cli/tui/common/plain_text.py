"""Text that is safe on a terminal, and rows as aligned columns or Markdown. Imports no textual."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_CONTROLS = r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
STEERS = re.compile(rf"\x1b(?:\[[0-9;]*m)?|{_CONTROLS}")
"""Matches what controls a terminal: control characters, colours, and characters that change the writing direction."""
UNPAINTED = re.compile(rf"\x1b(?!\[[0-9;]*m)|{_CONTROLS}")


def harmless(text: str) -> str:
    """Return the text without characters that control a terminal."""
    return STEERS.sub("", text)


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV; None is empty."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def fit_columns(
    names: Sequence[str], rows: Sequence[Sequence[Any]], least: Sequence[str], width: int | None
) -> tuple[list[int], list[str]]:
    """Return the places of the columns that fit into `width` cells, and the names of the others."""
    from rich.cells import cell_len

    sizes = [
        max(cell_len(cell(value)) for value in column) for column in zip(names, *rows, strict=True)
    ]
    places = list(range(len(names)))
    order = [names.index(name) for name in least if name in names[1:]]
    order += [place for place in reversed(places[1:]) if place not in order]
    dropped = []
    for place in order:
        if width is None or sum(sizes[n] + 2 for n in places) - 2 <= width:
            break
        places.remove(place)
        dropped.append(names[place])
    return places, dropped


def align_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield lines of columns separated by two spaces, numbers to the right; the heads are dim on a terminal.

    A Chinese character is two cells wide on a terminal, which rich knows.
    """
    from rich.cells import cell_len

    shown = harmless if sys.stdout.isatty() else str
    names = [shown(name) for name in names]
    texts = [[shown(cell(value)) for value in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(names, *texts, strict=True)]
    right = [
        all(isinstance(row[place], int | float | None) for row in rows)
        for place in range(len(names))
    ]

    def line(cells: Sequence[str]) -> str:
        spaces = [" " * (width - cell_len(text)) for text, width in zip(cells, widths, strict=True)]
        parts = [
            space + text if r else text + space
            for text, space, r in zip(cells, spaces, right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    head = line(names)
    yield f"\x1b[2m{head}\x1b[0m" if uses_colour() else head
    for row in texts:
        yield line(row)


def markdown_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(names)} |"
    yield "|" + " --- |" * len(names)
    for row in rows:
        yield f"| {' | '.join(cell(value).replace('|', chr(92) + '|') for value in row)} |"


def cell(value: Any) -> str:
    """Return a value in one line: floats with three decimal places, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return (
            f"{value:.3g}"
            if value and not 0.001 <= abs(value) < 1e15
            else f"{value:.3f}".rstrip("0").rstrip(".")
        )
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return " ".join(str(value).split())


def local_time(seconds: float | None) -> str:
    """Return a local time as text; a dash if unset."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def byte_size(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def uses_colour() -> bool:
    """Whether stdout is a terminal that may be coloured."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
