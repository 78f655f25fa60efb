"""Curves and bars as SVG pictures: plain shapes and text, no script, no font, nothing loaded. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from agentrl_cli.evaluate.stats import Estimate

COLORS = ("#1f5fbf", "#b86a10", "#2f7d3b", "#8a3fa0")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""Every curve has a dash of its own: it survives a printer and any kind of colour blindness."""
OPTIONS: dict[str, Any] = {
    "loader": FileSystemLoader(Path(__file__).parent),
    "autoescape": True,
    "trim_blocks": True,
    "lstrip_blocks": True,
    "undefined": StrictUndefined,
}
"""Of the templates of all pages and pictures."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart; `spans` are (x, low, high) of intervals."""

    name: str
    points: Sequence[tuple[float, float]]
    spans: Sequence[tuple[float, float, float]] = ()

    @property
    def shown(self) -> list[tuple[float, float]]:
        """Points with a finite value."""
        return [(x, y) for x, y in self.points if math.isfinite(y)]


def chart_svg(
    title: str, curves: Sequence[Curve], *, unit: bool = False, size: tuple[int, int] = (420, 190)
) -> str:
    """Return a chart with its axes and a legend if there are several curves.

    Values that are not finite are left out.
    """
    left, top, right, bottom = 60, 26 + 14 * (len(curves) > 1), size[0] - 10, size[1] - 22
    xs = [x for curve in curves for x, _ in curve.shown]
    ys = [y for curve in curves for _, y in curve.shown]
    ys += [y for curve in curves for span in curve.spans for y in span[1:]]
    low, high = min(ys, default=0.0), max(ys, default=0.0)
    if unit:
        low, high = min(low, 0.0), max(high, 1.0)
    elif high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    first, last = min(xs, default=0.0), max(xs, default=0.0)

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (x - first) / ((last - first) or 1.0) * (right - left)
        return round(across, 1), round(bottom - (y - low) / (high - low) * (bottom - top), 1)

    values = (low, (low + high) / 2, high) if ys else ()
    sides = {"left": left, "right": right, "first": first, "last": last}
    return _render(title, size, curves=curves, values=values, at=at, **sides)


def bars_svg(
    title: str, rows: Sequence[tuple[str, Sequence[Estimate]]], names: Sequence[str]
) -> str:
    """Return rates from 0 to 1: a block for each row, in it a bar with its interval for each name, if it has data."""
    height = 44 + len(rows) * (24 + 18 * len(names))
    return _render(title, (620, height), rows=rows, names=names)


def _render(title: str, size: tuple[int, int], **given: Any) -> str:
    template = Environment(**OPTIONS).get_template("charts.svg.jinja")
    looks = {"colors": COLORS, "dashes": DASHES}
    return template.render(title=title, width=size[0], height=size[1], **looks, **given)
