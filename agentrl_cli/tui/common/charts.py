"""Curves, sparklines and bars of characters. Pure: numbers in, strings out; NaN is a gap, never a crash."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from rich.text import Text

from agentrl_cli.tui.common.text import FAINT, GOOD, TITLE

Points = Sequence[tuple[float, float]]
"""(x, y) in order of x."""

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLOCKS = "▁▂▃▄▅▆▇█"
EMPTY = "\u2800"

OVER = (FAINT, "#c58fd0", "#8fc98f", "#d0a060")
"""Colours of the curves of other runs."""


def resample(
    points: Points, columns: int, x_range: tuple[float, float] | None = None
) -> list[float]:
    """Return the mean of y in each of `columns` equal stretches of x; NaN for a stretch without points."""
    clean = [(x, y) for x, y in points if math.isfinite(y)]
    low, high = x_range or ((clean[0][0], clean[-1][0]) if clean else (0.0, 0.0))
    cells: list[list[float]] = [[] for _ in range(columns)]
    for x, y in clean:
        if low <= x <= high:
            cells[min(int((x - low) / ((high - low) or 1.0) * columns), columns - 1)].append(y)
    return [sum(cell) / len(cell) if cell else math.nan for cell in cells]


def braille(
    points: Points,
    width: int,
    height: int,
    y_range: tuple[float, float],
    *,
    x_range: tuple[float, float] | None = None,
) -> list[str]:
    """Return a curve of braille dots, `height` rows of `width` characters (2 × 4 dots each), top row first."""
    rows, (low, high) = height * 4, y_range
    cells = [[0] * width for _ in range(height)]
    means = np.asarray(resample(points, width * 2, x_range))
    known = np.flatnonzero(np.isfinite(means))
    if len(
        known
    ):  # known values beside a gap are joined by a line, so that few points make a curve
        means = np.interp(range(len(means)), known, means[known], left=np.nan, right=np.nan)
    before: int | None = None
    for column, value in enumerate(means.tolist()):
        if not math.isfinite(value):
            before = None
            continue
        share = (min(max(value, low), high) - low) / ((high - low) or 1.0)
        level = round(share * (rows - 1))
        first, last = sorted((level if before is None else before, level))
        if last - first > 1:  # the dot at the level before is drawn already, in its own column
            first, last = (first + 1, last) if level == last else (first, last - 1)
        for row in range(rows - 1 - last, rows - first):
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
    log: bool = False,
) -> list[Text]:
    """Return a titled curve with its y limits and x limits; `others` are drawn under it, each in a colour of OVER;
    `marks` are steps on the axis, which says how many points a dot averages, or that few are joined by lines.

    `log`: a logarithmic y axis; other values than positive ones are left out; a curve with none stays linear.
    """
    log = log and any(y > 0 for _, y in points)
    curves = [
        [
            (x, math.log10(y) if log else y)
            for x, y in one
            if math.isfinite(y) and (y > 0 or not log)
        ]
        for one in (points, *others)
    ]
    lines, clean = [Text(title[:width], TITLE, no_wrap=True)], curves[0]
    if not clean:
        return lines + [Text("  no data yet", FAINT)] + [Text("")] * max(height - 1, 0)
    low, high = nice_range([y for one in curves for _, y in one], unit=unit and not log)
    shown = {0: short(10**high if log else high), height - 1: short(10**low if log else low)}
    gutter = max(5, *map(len, shown.values()))
    inner, xs = max(width - gutter - 1, 4), [x for x, _ in clean]
    x_range = min(xs), max(xs)
    drawn = [
        (braille(one, inner, height, (low, high), x_range=x_range), color)
        for one, color in zip(curves, (GOOD, *OVER * len(curves)), strict=False)
        if one
    ]
    for index in range(height):
        line = Text(f"{shown.get(index, ''):>{gutter}}│", FAINT, no_wrap=True)
        layers = [[(dots, color) for dots in rows[index]] for rows, color in drawn]
        cells = [  # of each column the first curve that has a dot there
            next((cell for cell in column if cell[0] != EMPTY), (EMPTY, FAINT))
            for column in zip(*layers, strict=True)
        ]
        for color, part in groupby(cells, lambda cell: cell[1]):
            line.append("".join(char for char, _ in part), color)
        lines.append(line)
    axis = _axis(x_range, marks, inner, len(clean))
    return [*lines, Text(" " * gutter + "└" + axis, FAINT, no_wrap=True)]


def _axis(x_range: tuple[float, float], marks: Sequence[float], inner: int, count: int) -> str:
    """Return the x axis with its limits and marks, and near its middle, where nothing else stands, how `count` points
    are drawn: as means if there are more than columns, joined by lines if they are few.
    """
    means = f" means of {-(-count // (2 * inner))} " if count > 2 * inner else ""
    note = means or (f" {count} points " if count * 2 <= inner else "")
    low, high = x_range
    cells = ["─"] * inner
    for mark in marks:
        if low <= mark <= high:
            cells[min(int((mark - low) / ((high - low) or 1) * inner), inner - 1)] = "┴"
    left, right = short(low), short(high)
    axis = left + "".join(cells)[len(left) : inner - len(right)] + right
    free = [
        at
        for at in range(1, len(axis) - len(note))
        if note and set(axis[at - 1 : at + len(note) + 1]) == {"─"}
    ]
    if not free:
        return axis
    at = min(free, key=lambda place: abs(2 * place + len(note) - len(axis)))
    return axis[:at] + note + axis[at + len(note) :]


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


def counts_line(places: Iterable[int], bins: int) -> str:
    """Return a histogram in one line: how many of `places` fall into each bin, those beyond the ends into the last."""
    counts = Counter(min(max(place, 0), bins - 1) for place in places)
    top = max(counts.values())
    return "".join((" " + _BLOCKS)[math.ceil(counts[place] / top * 8)] for place in range(bins))


def bar(fraction: float, width: int) -> str:
    """Return `[####....]` of exactly `width` cells."""
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
