"""Small helpers for lines of text: styles, numbers, clipping, wrapping. Pure; no textual."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

TITLE = "bold #8fbfff"
GOOD = "#7ac0ff"
BAD = "#ffb454"
FAINT = "#8a8a8a"
HERE = "bold #ffd75f"
ALARM = "bold #ffb454"
_CONSOLE = Console()
"""Of which `Text.wrap` needs the defaults alone."""


def num(value: float | None, spec: str = "+.2f") -> str:
    """Return a number or `-` for None and NaN."""
    if value is None or not math.isfinite(value):
        return "-"
    return format(value, spec) if abs(value) < 1e6 else f"{value:.3g}"


def clip(text: str, width: int) -> str:
    """Return the text in at most `width` cells, an ellipsis where it was cut."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def keep_end(text: str, width: int) -> str:
    """Return the end of a text that is too long: `…train-0301` and `…train-0352` show the difference."""
    if cell_len(text) <= width:
        return text
    return "…" + next(text[n:] for n in range(1, len(text) + 1) if cell_len(text[n:]) < width)


def pad(text: str, width: int) -> str:
    """Return the text with spaces up to `width` cells; a longer one as it is."""
    return text + " " * (width - cell_len(text))


def pad_left(text: str, width: int) -> str:
    """Return the text with spaces before it up to `width` cells; a longer one as it is."""
    return " " * (width - cell_len(text)) + text


def line(text: str, width: int, style: str = "") -> Text:
    """Return a line of at most `width` cells, which is never broken."""
    return Text(clip(text, width), style, no_wrap=True)


def wrap(text: str, width: int) -> list[str]:
    """Return the words of a text as lines of at most `width` cells; a longer word is cut."""
    words = " ".join(text.split())
    if cell_len(words) <= width:
        return [words]
    return [part for line in Text(words).wrap(_CONSOLE, width) if (part := line.plain.strip())]


def join(lines: Iterable[Text]) -> Text:
    """Return lines as one text."""
    return Text("\n").join(list(lines))


def quote(text: str) -> str:
    """Return a value for the filter language, whatever is in it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
