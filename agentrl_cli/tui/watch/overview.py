"""What the overview of watch puts where, by the size of the terminal, and what a click on it chooses. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.text import Text

from agentrl_cli.tui.common.panels import FAINT, TITLE, clip
from agentrl_cli.tui.watch import panels as panes
from agentrl_cli.tui.watch.charts import Look, beside, chart_grid
from agentrl_cli.tui.watch.data import WatchData, step_line


@dataclass
class Overview:
    """Lines, and for those that can be chosen the place of the cursor there."""

    lines: list[Text] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    alerts: Sequence[Mapping[str, Any]] = ()
    """Those that are shown: the last places of the cursor."""

    def add(self, lines: list[Text], first: int = 0, place: int = 0, count: int = 0) -> None:
        """More lines; `count` of them, from the `first` on, are the cursor's places from `place` on."""
        self.rows |= {len(self.lines) + first + n: place + n for n in range(min(count, len(lines) - first))}
        self.lines += lines


def _now(data: WatchData, width: int, limit: int, cursor: int) -> tuple[list[Text], int, int, int]:
    """The running episodes as `Overview.add` takes them."""
    place = panes.first_live(data, limit, cursor)
    return panes.now_lines(data, width, limit, cursor), 2, place, min(limit, len(data.live))


def _notable(data: WatchData, width: int, cursor: int) -> tuple[list[Text], int, int, int]:
    before = len(data.live)
    return panes.notable_lines(data, width, cursor - before), 1, before, len(data.notable)


def _alerts(data: WatchData, width: int, limit: int, cursor: int) -> tuple[list[Text], int, int, int]:
    before = len(data.live) + len(data.notable)
    return panes.alert_lines(data, width, limit, cursor - before), 1, before, len(data.alerts[-limit:])


def wide(data: WatchData, width: int, height: int, cursor: int) -> Overview:
    """The middle pane of a large terminal."""
    live = max(min(len(data.live), height - 28), 4)
    now, notable = _now(data, width, live, cursor), _notable(data, width, cursor)
    alerts = _alerts(data, width, 4, cursor)
    said = panes.live_lines(data, width, min(height - len(now[0]) - len(notable[0]) - len(alerts[0]) - 10, 8), cursor)
    out = Overview(alerts=data.alerts[-4:])
    out.add(*now)
    out.add([Text("")])
    out.add(*notable)
    out.add([Text("")])
    out.add(*alerts)
    out.add([Text("")])
    out.add([*said, Text("")] if said else [])  # down here, so that nothing above moves with the cursor
    out.add(panes.log_lines(data.logs, "LOG (7)", width, max(height - len(out.lines) - 1, 3)))
    return out


OTHERS = r"^(?!(step|at|lr|learning_rate|seconds|reward|solved|eval)$)"
"""What the two further columns of charts leave to the others: it is drawn beside them, or hardly ever moves."""
CURVES = 30
"""Cells of the curves pane that fits beside everything else; what is wider holds two columns of charts more."""


def curves_of(data: WatchData, width: int, height: int, look: Look) -> list[Text]:
    """The left pane: curves, and on a wide terminal further metrics as charts in two columns beside them."""
    if width < 2 * CURVES:
        return panes.curve_lines(data, width, height, look.other)
    left = panes.curve_lines(data, CURVES, height, look.other)
    charts = chart_grid(data, width - CURVES - 2, 4, replace(look, tab=look.tab or OTHERS), columns=2)
    return beside([left, charts[:height]], CURVES + 2)


def small(data: WatchData, width: int, height: int, cursor: int) -> Overview:
    """80x24: curves of one line, then running episodes, notable ones and two alerts, as far as there is room."""
    curves, alerts = panes.small_lines(data, width), _alerts(data, width, 2, cursor)
    room = height - len(curves) - len(alerts[0])
    limit = max(min(len(data.live), 6, room - 3), 0) if cursor < len(data.live) else 0
    now, notable = _now(data, width, limit, cursor), _notable(data, width, cursor)
    left = max(room - len(now[0]), 0)
    out = Overview(alerts=data.alerts[-2:])
    out.add(curves)
    out.add(*now)
    if left > 1:
        out.add(notable[0][:left], *notable[1:])
    out.add(*alerts)
    return out


def tiny(data: WatchData, width: int, height: int) -> Overview:
    """Below 80x20: the plain line of each of the last steps."""
    rows = [step_line(row) for row in data.steps[-max(height - 1, 1) :]]
    lines = [Text(clip(line, width), no_wrap=True) for line in rows] or [Text("no step has finished yet", FAINT)]
    return Overview([*lines, Text(clip("a larger terminal shows more", width), FAINT)])


def facts(data: WatchData, width: int) -> list[Text]:
    """The right pane in three lines, for terminals that have no room for it: run, time and store, health and keys."""
    run = [line.plain.strip() for line in panes.run_lines(data, 200) if "[" not in line.plain]
    times = [" ".join(line.plain.split()[:3]) for line in panes.time_lines(data, 200) if line.plain.strip()]
    stored = [line.plain.strip() for line in panes.store_lines(data, 200) if line.plain.strip()]
    health = [line.plain.strip() for line in panes.health_lines(data, 200)[:-1]]
    waiting = [f"waiting: {', '.join(data.pending)}"] if data.pending else []
    rows = (run, [*times, *stored], [*waiting, *health])
    return [Text(clip("  ".join(row), width), TITLE if n == 0 else "", no_wrap=True) for n, row in enumerate(rows)]
