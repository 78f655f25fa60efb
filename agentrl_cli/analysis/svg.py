"""Curves as SVG pictures: plain shapes and text, no script, no font, nothing loaded. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from agentrl_cli.evaluate.stats import Estimate

Points = Sequence[tuple[float, float]]

COLORS = ("#1f5fbf", "#b86a10", "#2f7d3b", "#8a3fa0")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""Every curve has a dash of its own: it survives a printer and any kind of colour blindness."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart; `spans` are (x, low, high) of intervals."""

    name: str
    points: Points
    spans: Sequence[tuple[float, float, float]] = ()


def chart_svg(
    title: str, curves: Sequence[Curve], *, unit: bool = False, size: tuple[int, int] = (420, 190)
) -> str:
    """Return a chart with its axes and a legend if there are several curves.

    Values that are not finite are left out.
    """
    width, height = size
    shown = [[(x, y) for x, y in curve.points if math.isfinite(y)] for curve in curves]
    ys = [y for points in shown for _, y in points] + [
        y for curve in curves for span in curve.spans for y in span[1:]
    ]
    xs = [x for points in shown for x, _ in points]
    left, top, right, bottom = 60, 26 + 14 * (len(curves) > 1), width - 10, height - 22
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="sans-serif" font-size="11"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        f'<text x="8" y="16" font-weight="bold" fill="#222222">{escape(title)}</text>'
    )
    if not ys:
        return f'{head}<text x="8" y="40" fill="#666666">no values</text></svg>'
    low, high = (min(*ys, 0.0), max(*ys, 1.0)) if unit else (min(ys), max(ys))
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    first, last = min(xs), max(xs)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1.0)
        return round(left + across * (right - left), 1), round(
            bottom - (y - low) / (high - low) * (bottom - top), 1
        )

    parts = [head]
    for value in (low, (low + high) / 2, high):
        y = at(first, value)[1]
        parts.append(f'<path d="M{left} {y}H{right}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="#555555">{value:.2g}</text>'
        )
    parts.append(f'<text x="{left}" y="{height - 6}" fill="#555555">{first:g}</text>')
    parts.append(
        f'<text x="{right}" y="{height - 6}" text-anchor="end" fill="#555555">step {last:g}</text>'
    )
    for number, (curve, points) in enumerate(zip(curves, shown, strict=True)):
        color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
        for x, below, above in curve.spans:
            (across, one), (_, two) = at(x, below), at(x, above)
            parts.append(
                f'<path d="M{across} {one}V{two}M{across - 3} {one}h6M{across - 3} {two}h6" stroke="{color}"/>'
            )
        places = [at(x, y) for x, y in points]
        line = " ".join(f"{x},{y}" for x, y in places)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6" stroke-dasharray="{dash}"/>'
        )
        dots = places if len(places) <= 12 else places[-1:]
        parts += [f'<circle cx="{x}" cy="{y}" r="2.2" fill="{color}"/>' for x, y in dots]
        if len(curves) > 1:
            x = left + number * (right - left) // len(curves)
            parts.append(f'<text x="{x}" y="32" fill="{color}">{escape(curve.name)}</text>')
    return "".join([*parts, "</svg>"])


def bars_svg(
    title: str, rows: Sequence[tuple[str, Sequence[Estimate]]], names: Sequence[str]
) -> str:
    """Rates from 0 to 1: a block for each row, in it a bar with its interval for each name, if it has data."""
    left, step, width = 170, 18, 620
    height = 44 + sum(24 + step * len(names) for _ in rows)
    scale = width - left - 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="sans-serif" font-size="11"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        f'<text x="8" y="16" font-weight="bold" fill="#222222">{escape(title)}</text>'
    ]
    y = 32
    for row, estimates in rows:
        parts.append(
            f'<text x="8" y="{y + 8}" font-weight="bold" fill="#222222">{escape(row)}</text>'
        )
        y += 18
        for number, (name, one) in enumerate(zip(names, estimates, strict=True)):
            parts.append(
                f'<text x="{left - 8}" y="{y + 9}" text-anchor="end" fill="#222222">{escape(name[-26:])}</text>'
            )
            if one.n:
                low, mid, high = (
                    round(left + scale * value, 1) for value in (one.low, one.value, one.high)
                )
                color = COLORS[number % len(COLORS)]
                parts.append(
                    f'<rect x="{left}" y="{y}" width="{mid - left:.1f}" height="11" fill="{color}" opacity="0.6"/>'
                )
                parts.append(
                    f'<path d="M{low} {y + 5.5}H{high}" stroke="#222222" stroke-width="1.5"/>'
                )
                parts.append(
                    f'<text x="{high + 6}" y="{y + 9}" fill="#222222">{one.value:.3f}</text>'
                )
            y += step
        y += 6
    return "".join([*parts, "</svg>"])
