"""Prints rows as aligned text for people, or as JSON, CSV or Markdown for programs."""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.commands.common import echo, echo_json, echo_jsonl, harmless, narrate

if TYPE_CHECKING:
    from agentrl_cli.evaluate import EvalResult
    from agentrl_cli.evaluate.stats import Estimate


class Format(StrEnum):
    """How a list is printed."""

    table = "table"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"
    md = "md"


def print_rows(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    format: Format = Format.table,
    *,
    least: Sequence[str] = (),
    width: int | None = None,
) -> None:
    """Print rows under their column names to stdout.

    A table that is wider than the terminal loses columns, those of `least` first, then from the right; the first stays.
    `width`: cells of a line; None: those of the terminal, without a limit elsewhere.
    """
    if format is Format.json:
        echo_json([dict(zip(names, row, strict=True)) for row in rows])
    elif format is Format.jsonl:
        echo_jsonl(dict(zip(names, row, strict=True)) for row in rows)
    elif format is Format.csv:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([list(names), *rows])
        echo(out.getvalue().rstrip("\n"))
    elif format is Format.md:
        for line in markdown(names, rows):
            echo(line)
    else:
        if width is None and sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
        places, dropped = fitting(names, rows, least, width)
        for line in aligned([names[n] for n in places], [[row[n] for n in places] for row in rows]):
            echo(line, painted=True)
        if dropped:
            narrate(
                f"Left out for want of width: {', '.join(dropped)}. --format md, or a file, has them."
            )


def fitting(
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


def aligned(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Columns separated by two spaces, numbers to the right; the heads are dim on a terminal.

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
    yield f"\x1b[2m{head}\x1b[0m" if coloured() else head
    for row in texts:
        yield line(row)


def markdown(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
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
            if value and abs(value) < 0.001
            else f"{value:.3f}".rstrip("0").rstrip(".")
        )
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return " ".join(str(value).split())


def clock(seconds: float | None) -> str:
    """Return a local time as text; a dash if unset."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def size(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def write_svg(
    path: Path, rows: Sequence[tuple[str, Sequence[Estimate]]], models: Sequence[EvalResult]
) -> None:
    """A picture of pass@1: a row for each split, a bar for each model."""
    from agentrl_cli.reports.svg import bars_svg

    path.write_text(
        bars_svg("pass@1, 95 % intervals", rows, [model.name for model in models]), encoding="utf-8"
    )
    narrate(f"Picture: {path}")


def interval(one: Estimate) -> str:
    """Return a share with its interval; - without anything measured."""
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]" if one.n else "-"
