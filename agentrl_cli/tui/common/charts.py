"""Curves, sparklines and bars of characters. Pure: numbers in, strings out; NaN is a gap, never a crash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

from rich.text import Text

Points = Sequence[tuple[float, float]]
"""(x, y) in order of x."""

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLOCKS = "▁▂▃▄▅▆▇█"

TITLE = "bold #8fbfff"
LINE = "#7ac0ff"
FAINT = "#8a8a8a"
OVER = (FAINT, "#c58fd0", "#8fc98f", "#d0a060")
"""Colours of the curves of other runs."""


def resample(
    points: Points, columns: int, x_range: tuple[float, float] | None = None
) -> list[float]:
    """Return the mean of y in each of `columns` equal stretches of x; NaN for a stretch without points."""
    sums, counts = [0.0] * columns, [0] * columns
    clean = [(x, y) for x, y in points if math.isfinite(y)]
    if not clean:
        return [math.nan] * columns
    low, high = x_range or (clean[0][0], clean[-1][0])
    span = (high - low) or 1.0
    for x, y in clean:
        if low <= x <= high:
            at = min(int((x - low) / span * columns), columns - 1)
            sums[at] += y
            counts[at] += 1
    return [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]


def _fill(values: list[float]) -> list[float]:
    """Gaps between two known values are joined by a straight line, so that few points still make a curve."""
    known = [i for i, value in enumerate(values) if math.isfinite(value)]
    out = list(values)
    for a, b in pairwise(known):
        for i in range(a + 1, b):
            out[i] = values[a] + (values[b] - values[a]) * (i - a) / (b - a)
    return out


def braille(
    points: Points,
    width: int,
    height: int,
    y_range: tuple[float, float],
    *,
    x_range: tuple[float, float] | None = None,
    join: bool = True,
) -> list[str]:
    """Return a curve of braille dots, `height` rows of `width` characters (2 × 4 dots each), top row first."""
    columns, rows = width * 2, height * 4
    low, high = y_range
    span = (high - low) or 1.0
    values = resample(points, columns, x_range)
    if join:
        values = _fill(values)
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(values):
        if not math.isfinite(value):
            before = None
            continue
        level = round((min(max(value, low), high) - low) / span * (rows - 1))
        first, last = (
            (level, level)
            if before is None or not join
            else (min(before, level), max(before, level))
        )
        if before is not None and join and last - first > 1:
            first, last = (first + 1, last) if level == last else (first, last - 1)
        for dot in range(first, last + 1):
            row = rows - 1 - dot
            cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
        before = level
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]


def nice_range(values: Sequence[float], *, unit: bool = False) -> tuple[float, float]:
    """Return a y range that holds all values; [0, 1] at least for shares and rewards (`unit`)."""
    clean = [value for value in values if math.isfinite(value)]
    if not clean:
        return (0.0, 1.0)
    low, high = min(clean), max(clean)
    if unit:
        return (min(low, 0.0), max(high, 1.0))
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # constant up to rounding
        return (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    return (low, high)


def short(value: float | None) -> str:
    """Return a number in at most seven characters."""
    if value is None or not math.isfinite(value):
        return "-"
    if value and (abs(value) < 0.001 or abs(value) >= 100_000):
        return f"{value:.0e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{3 if abs(value) < 10 else 1}f}".rstrip("0").rstrip(".")


def chart(
    title: str,
    points: Points,
    width: int,
    height: int,
    *,
    unit: bool = False,
    others: Sequence[Points] = (),
    marks: Sequence[float] = (),
    join: bool = True,
    log: bool = False,
) -> list[Text]:
    """Return a titled curve with its y limits and x limits; `others` are drawn under it, each in a colour of OVER;
    `marks` are steps on the axis, which says how many points a dot averages, or that few are joined by lines.

    `log`: a logarithmic y axis; what is not positive is left out, and a curve without anything positive stays linear.
    """
    clean = [(x, y) for x, y in points if math.isfinite(y)]
    log = log and any(y > 0 for _, y in clean)
    if log:
        clean, others = _logged(clean), [_logged(other) for other in others]
    lines = [Text(title[:width], TITLE, no_wrap=True)]
    if not clean:
        return lines + [Text("  no data yet", FAINT)] + [Text("")] * max(height - 1, 0)
    y_range = nice_range(
        [y for points in (clean, *others) for _, y in points], unit=unit and not log
    )
    gutter = max(5, *(len(short(10**limit if log else limit)) for limit in y_range))
    inner = max(width - gutter - 1, 4)
    x_range = (min(x for x, _ in clean), max(x for x, _ in clean))
    rows = braille(clean, inner, height, y_range, x_range=x_range, join=join)
    below = [
        braille(other, inner, height, y_range, x_range=x_range, join=join) if other else []
        for other in others
    ]
    for index, row in enumerate(rows):
        limit = y_range[1] if index == 0 else y_range[0] if index == height - 1 else None
        label = "" if limit is None else short(10**limit if log else limit)
        line = Text(f"{label:>{gutter}}│", FAINT, no_wrap=True)
        layers = [
            (row, LINE),
            *((lines[index], OVER[n % len(OVER)]) for n, lines in enumerate(below) if lines),
        ]
        cells = [_top(layers, column) for column in range(inner)]
        for color, part in groupby(cells, lambda cell: cell[1]):
            line.append("".join(char for char, _ in part), color)
        lines.append(line)
    axis = ["─"] * inner
    for mark in marks:
        if x_range[0] <= mark <= x_range[1]:
            axis[
                min(int((mark - x_range[0]) / ((x_range[1] - x_range[0]) or 1) * inner), inner - 1)
            ] = "┴"
    left, right = short(x_range[0]), short(x_range[1])
    axis_text = "".join(axis)
    axis_text = left + axis_text[len(left) : inner - len(right)] + right
    axis_text = _noted(axis_text, drawn_as(len(clean), inner * 2) if join else "")
    lines.append(Text(" " * 5 + "└" + axis_text, FAINT, no_wrap=True))
    return lines


def drawn_as(points: int, columns: int) -> str:
    """What a curve does with its points, for its axis: means where there are more than columns, lines between few."""
    if points > columns:
        return f" means of {-(-points // columns)} "
    return f" {points} points " if points * 4 <= columns else ""


def _noted(axis: str, note: str) -> str:
    """Return an axis with a note near its middle, where nothing else stands."""
    free = [
        at
        for at in range(len(axis))
        if note and set(axis[max(at - 1, 0) : at + len(note) + 1]) == {"─"}
    ]
    free = [at for at in free if 0 < at < len(axis) - len(note)]
    if not free:
        return axis
    at = min(free, key=lambda place: abs(2 * place + len(note) - len(axis)))
    return axis[:at] + note + axis[at + len(note) :]


def _top(layers: Sequence[tuple[str, str]], column: int) -> tuple[str, str]:
    """(character, colour) of the first curve that has a dot in a column."""
    return next(
        ((row[column], color) for row, color in layers if row[column] != "\u2800"),
        ("\u2800", FAINT),
    )


def _logged(points: Points) -> list[tuple[float, float]]:
    return [(x, math.log10(y)) for x, y in points if math.isfinite(y) and y > 0]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values in one line of blocks, resampled to `width`; a gap is a space."""
    columns = list(values)
    if len(columns) > width:
        columns = resample(list(enumerate(columns)), width, (0, len(columns) - 1))
    low, high = nice_range([v for v in columns if math.isfinite(v)])
    span = (high - low) or 1.0
    return "".join(
        _BLOCKS[round((v - low) / span * 7)] if math.isfinite(v) else " " for v in columns
    )


def bar(fraction: float, width: int) -> str:
    """`[####....]` of exactly `width` cells."""
    inner = max(width - 2, 1)
    full = round(min(max(fraction if math.isfinite(fraction) else 0.0, 0.0), 1.0) * inner)
    return f"[{'#' * full}{'.' * (inner - full)}]"


def span(seconds: float) -> str:
    """Return a time span as text: `37 s`, `12 min`, `2 h 53`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d}"
