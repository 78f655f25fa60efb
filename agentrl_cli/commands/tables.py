"""Prints rows as aligned text for people, or as JSON, CSV or Markdown for programs."""

from __future__ import annotations

import csv
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

from agentrl_cli.commands.common import echo, echo_json, echo_jsonl, harmless


class Format(StrEnum):
    """How a list is printed."""

    table = "table"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"
    md = "md"


def print_rows(names: Sequence[str], rows: Sequence[Sequence[Any]], format: Format = Format.table) -> None:
    """Print rows under their column names to stdout."""
    if format is Format.json:
        echo_json([dict(zip(names, row, strict=True)) for row in rows])
    elif format is Format.jsonl:
        echo_jsonl(dict(zip(names, row, strict=True)) for row in rows)
    elif format is Format.csv:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([list(names), *rows])
        echo(out.getvalue().rstrip("\n"))
    else:
        for line in markdown(names, rows) if format is Format.md else aligned(names, rows):
            echo(line, painted=format is not Format.md)


def aligned(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Columns separated by two spaces, numbers to the right; the heads are dim on a terminal.

    A Chinese character is two cells wide on a terminal, which rich knows.
    """
    from rich.cells import cell_len

    shown = harmless if sys.stdout.isatty() else str
    names = [shown(name) for name in names]
    texts = [[shown(cell(value)) for value in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(names, *texts, strict=True)]
    right = [all(isinstance(row[place], int | float | None) for row in rows) for place in range(len(names))]

    def line(cells: Sequence[str]) -> str:
        spaces = [" " * (width - cell_len(text)) for text, width in zip(cells, widths, strict=True)]
        parts = [space + text if r else text + space for text, space, r in zip(cells, spaces, right, strict=True)]
        return "  ".join(parts).rstrip()

    head = line(names)
    yield f"\x1b[2m{head}\x1b[0m" if coloured() else head
    for row in texts:
        yield line(row)


def markdown(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield "|" + " --- |" * len(names)
    for row in rows:
        yield f"| {' | '.join(cell(value).replace('|', chr(92) + '|') for value in row)} |"


def cell(value: Any) -> str:
    """A value in one line: floats with three decimal places, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if value and abs(value) < 0.001 else f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return " ".join(str(value).split())


def clock(seconds: float | None) -> str:
    """A local time as text; a dash if unset."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def size(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
