"""Splits the cost of a turn after other turns into a constant part and attention.

Attention reads every position before a token, so its part is proportional to the context: the measured milliseconds are
fitted by `fixed + slope · context` (least squares over turns 2 to the last; the first also reads its whole prompt).
The residual shows growth of any other kind. `svg` draws it, as plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 360, 60, 48, 56
FIXED, ATTENTION, MEASURED = "#8da0cb", "#fc8d62", "#222222"


def split_costs(milliseconds: Sequence[float], contexts: Sequence[float]) -> dict[str, Any]:
    """The fit. `contexts`: mean positions that the tokens of each turn attend to.

    Returns the fixed milliseconds, those per 1,000 positions of context, attention's share of each turn's
    measurement, and the largest relative residual of a turn.
    """
    y, x = np.asarray(milliseconds, float), np.asarray(contexts, float)
    slope, fixed = np.polyfit(x[1:], y[1:], 1)
    fitted = fixed + slope * x
    return {
        "context_by_turn": x.round(1).tolist(),
        "fixed_ms": round(float(fixed), 2),
        "attention_ms_per_1000_positions": round(1000 * float(slope), 2),
        "attention_share_by_turn": (slope * x / fitted).round(3).tolist(),
        "largest_distance_from_fit": round(
            float(np.max(np.abs(y[1:] - fitted[1:]) / fitted[1:])), 4
        ),
    }


def svg(milliseconds: Sequence[float], fit: dict[str, Any], title: str) -> str:
    """Bars of the two parts for every turn, and the measurements as points."""
    contexts = fit["context_by_turn"]
    parts = [(fit["fixed_ms"], fit["attention_ms_per_1000_positions"] * c / 1000) for c in contexts]
    top = 1.1 * max(*milliseconds, *(sum(pair) for pair in parts))
    step = (WIDTH - LEFT - 20) / len(milliseconds)
    ground = HEIGHT - BOTTOM

    def high(value: float) -> float:
        return float(value / top * (ground - TOP))

    out = [_text(LEFT, 20, title, "start", 14), _axis(top, ground)]
    out += _legend()
    for n, (measured, (fixed, attention)) in enumerate(zip(milliseconds, parts, strict=True)):
        left = LEFT + n * step + 0.15 * step
        for below, part, colour in ((0.0, fixed, FIXED), (fixed, attention, ATTENTION)):
            y = ground - high(below + part)
            size = f'width="{0.7 * step:.1f}" height="{high(part):.1f}"'
            out.append(f'<rect x="{left:.1f}" y="{y:.1f}" {size} fill="{colour}"/>')
        middle = left + 0.35 * step
        out.append(
            f'<circle cx="{middle:.1f}" cy="{ground - high(measured):.1f}" r="3.5" fill="{MEASURED}"/>'
        )
        out.append(_text(middle, ground + 16, str(n + 1)))
        out.append(_text(middle, ground + 32, f"{contexts[n]:.0f}", size=9))
    out.append(_text(WIDTH / 2, HEIGHT - 6, "turn, and the positions that its tokens attend to"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    white = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, white, *out, "</svg>", ""])


def _axis(top: float, ground: float) -> str:
    """Lines at round milliseconds, with their numbers."""
    unit = next(
        u
        for u in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
        if top / u <= 8 or u == 10000
    )
    lines = []
    for value in range(0, int(top) + 1, unit):
        y = ground - value / top * (ground - TOP)
        lines.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 20}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        lines.append(_text(LEFT - 6, y + 4, str(value), "end"))
    lines.append(_text(LEFT - 6, TOP - 8, "ms of CPU", "end", 9))
    return "\n".join(lines)


def _legend() -> list[str]:
    names = (
        (FIXED, "the same for every turn"),
        (ATTENTION, "attention: proportional to the context"),
    )
    out = []
    for n, (colour, name) in enumerate(names):
        left = LEFT + 20 + 190 * n
        out.append(f'<rect x="{left}" y="30" width="10" height="10" fill="{colour}"/>')
        out.append(_text(left + 15, 39, name, "start"))
    out.append(f'<circle cx="{LEFT + 475}" cy="35" r="3.5" fill="{MEASURED}"/>')
    out.append(_text(LEFT + 485, 39, "measured", "start"))
    return out


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{text}</text>'
