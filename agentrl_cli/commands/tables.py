"""Prints rows as aligned text for people, or as JSON, CSV or Markdown for programs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.commands.common import echo, echo_json, echo_jsonl, narrate
from agentrl_cli.errors import writing
from agentrl_cli.tui.common.plain_text import align_rows, csv_text, fit_columns, markdown_rows

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
) -> None:
    """Print rows under their column names to stdout.

    A table that is wider than the terminal loses columns, those of `least` first, then from the right; the first stays.
    """
    if format is Format.json:
        echo_json([dict(zip(names, row, strict=True)) for row in rows])
    elif format is Format.jsonl:
        echo_jsonl(dict(zip(names, row, strict=True)) for row in rows)
    elif format is Format.csv:
        echo(csv_text([names, *rows]).rstrip("\n"))
    elif format is Format.md:
        for line in markdown_rows(names, rows):
            echo(line)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        places, dropped = fit_columns(names, rows, least, width)
        for line in align_rows(
            [names[n] for n in places], [[row[n] for n in places] for row in rows]
        ):
            echo(line, painted=True)
        if dropped:
            narrate(f"Left out for want of width: {', '.join(dropped)}. A pipe or --json has them.")


def write_svg(
    path: Path, rows: Sequence[tuple[str, Sequence[Estimate]]], models: Sequence[EvalResult]
) -> None:
    """Write a picture of pass@1: a row for each split, a bar for each model. Raises StoreError."""
    from agentrl_cli.reports.svg import bars_svg

    picture = bars_svg("pass@1, 95 % intervals", rows, [model.name for model in models])
    with writing(str(path), hint="Name another file with --svg."):
        path.write_text(picture, encoding="utf-8")
    narrate(f"Picture: {path}")


def interval(one: Estimate) -> str:
    """Return a share with its interval; - without anything measured."""
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]" if one.n else "-"
