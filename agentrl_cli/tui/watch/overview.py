"""The overview of watch: episodes and alerts, curves, what the run is, a strip of log; by the terminal's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from agentrl_cli.tui.common.lines import Rows
from agentrl_cli.tui.common.text import FAINT, TITLE, clip, join
from agentrl_cli.tui.watch import panels as panes
from agentrl_cli.tui.watch.charts import overview_charts
from agentrl_cli.tui.watch.data import WatchData, step_line
from agentrl_cli.tui.watch.page import Page, Shown


@dataclass
class Layout:
    """The lines of the left pane, and the cursor's place for those that can be chosen."""

    lines: list[Text] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    alerts: Sequence[Mapping[str, Any]] = ()
    """The alerts that are shown: the last places of the cursor."""

    def add(self, lines: list[Text], first: int = 0, place: int = 0, count: int = 0) -> None:
        """More lines; `count` of them, from the `first` on, are the cursor's places from `place` on."""
        self.rows |= {
            len(self.lines) + first + n: place + n for n in range(min(count, len(lines) - first))
        }
        self.lines += lines


def _now(data: WatchData, width: int, limit: int, cursor: int) -> tuple[list[Text], int, int, int]:
    """Return the running episodes as `Layout.add` takes them."""
    place = panes.first_live(data, limit, cursor)
    return panes.now_lines(data, width, limit, cursor), 2, place, min(limit, len(data.live))


def _notable(data: WatchData, width: int, cursor: int) -> tuple[list[Text], int, int, int]:
    before = len(data.live)
    return panes.notable_lines(data, width, cursor - before), 1, before, len(data.notable)


def _alerts(
    data: WatchData, width: int, limit: int, cursor: int
) -> tuple[list[Text], int, int, int]:
    before = len(data.live) + len(data.notable)
    return (
        panes.alert_lines(data, width, limit, cursor - before),
        1,
        before,
        len(data.alerts[-limit:]),
    )


def wide(data: WatchData, width: int, height: int, cursor: int) -> Layout:
    """Return the left pane of a large terminal."""
    live = max(min(len(data.live), height - 24), 2)
    out = Layout(alerts=data.alerts[-4:])
    parts = [_now(data, width, live, cursor)]
    if data.notable:
        parts.append(_notable(data, width, cursor))
    if data.alerts:
        parts.append(_alerts(data, width, 4, cursor))
    for part in parts:
        out.add(*part)
        out.add([Text("")])
    out.add(
        panes.live_lines(data, width, height - len(out.lines), cursor)
    )  # last: nothing above moves with the cursor
    return out


STRIP = 3
"""Lines of log under the overview."""


def strip_lines(data: WatchData, width: int) -> list[Text]:
    """Return the newest lines of the log and alerts by time; none before the first one."""
    rows = sorted([*data.logs[-STRIP:], *data.alerts[-STRIP:]], key=lambda row: float(row["at"]))
    return panes.log_lines(rows, "", width, STRIP)[1:] if rows else []


def small(data: WatchData, width: int, height: int, cursor: int) -> Layout:
    """80x24: curves of one line, then as many running and notable episodes and alerts as fit."""
    curves, alerts = panes.small_lines(data, width), _alerts(data, width, 2, cursor)
    room = height - len(curves) - len(alerts[0])
    limit = max(min(len(data.live), 6, room - 3), 0) if cursor < len(data.live) else 0
    now, notable = _now(data, width, limit, cursor), _notable(data, width, cursor)
    left = max(room - len(now[0]), 0)
    out = Layout(alerts=data.alerts[-2:])
    out.add(curves)
    out.add(*now)
    if left > 1:
        out.add(notable[0][:left], *notable[1:])
    out.add(*alerts)
    return out


def tiny(data: WatchData, width: int, height: int) -> Layout:
    """Below 80x20: the plain line of each of the last steps."""
    rows = [step_line(row) for row in data.steps[-max(height - 1, 1) :]]
    lines = [Text(clip(line, width), no_wrap=True) for line in rows] or [
        Text("no step has finished yet", FAINT)
    ]
    return Layout([*lines, Text(clip("a larger terminal shows more", width), FAINT)])


def summary(data: WatchData, width: int) -> list[Text]:
    """Return the right pane in three lines, for terminals without room for it: run, time and store, health."""
    run = [line.plain.strip() for line in panes.run_lines(data, 200) if "[" not in line.plain]
    times = [
        " ".join(line.plain.split()[:3])
        for line in panes.time_lines(data, 200)
        if line.plain.strip()
    ]
    stored = [line.plain.strip() for line in panes.store_lines(data, 200) if line.plain.strip()]
    health = [line.plain.strip() for line in panes.health_lines(data, 200)[:-1]]
    waiting = [f"waiting: {', '.join(data.pending)}"] if data.pending else []
    rows = (run, [*times, *stored], [*waiting, *health])
    return [
        Text(clip("  ".join(row), width), TITLE if n == 0 else "", no_wrap=True)
        for n, row in enumerate(rows)
    ]


def right_pane(data: WatchData, others: Sequence[WatchData], width: int, height: int) -> list[Text]:
    """Return the right pane: the run, health, controls, and as much of the rest as fits.

    The order of the blocks is fixed; if there is too little room, the least important are left out.
    """
    health = panes.health_lines(data, width)
    top = any(check.level == "done" for check in data.health)
    parts: list[tuple[int, list[Text]]] = [  # the higher the number, the earlier it is left out
        (0, [*(health if top else []), *panes.run_lines(data, width)]),
        (3, panes.time_lines(data, width)),
        (5, panes.part_lines(data, width)),
        (4, panes.histogram_lines(data.advantages, width) if data.advantages else []),
        (2, panes.store_lines(data, width)),
        (0, [] if top else health),
        (1, panes.compare_lines(data, others, width)),
        (0, panes.control_lines(data, width)),
    ]
    parts = [(place, [line for line in lines if line.plain.strip()]) for place, lines in parts]
    parts = [(place, lines) for place, lines in parts if lines]
    while sum(len(lines) + 1 for _, lines in parts) - 1 > height and max(
        place for place, _ in parts
    ):
        parts.remove(max(parts, key=lambda part: part[0]))
    return [line for _, lines in parts for line in (*lines, Text(""))][:-1]


class OverviewPage(Vertical, Page):
    """The tab that watch opens with; running and notable episodes and alerts can be chosen."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.cursor = 0
        self.layout_ = Layout()
        self._curves_key: Any = None

    def compose(self) -> ComposeResult:
        with Horizontal():
            with Vertical(id="left", classes="pane"):
                yield Rows(id="now")
            yield Static(id="curves", classes="pane")
            yield Static(id="run", classes="pane")
        yield Static(id="strip", classes="pane")

    def draw(self, shown: Shown) -> None:
        super().draw(shown)
        data, size = shown.data, self.query_one("#left").size
        width, height = max(self.screen.size.width - 4, 20), max(size.height, 4)
        if self.screen.has_class("-tiny"):
            self.layout_ = tiny(data, width, height)
        elif self.screen.has_class("-small"):
            self.layout_ = small(data, width, height, self.cursor)
        else:
            self.layout_ = wide(data, max(size.width, 20), max(size.height, 12), self.cursor)
            self._show_curves(shown)
            lines, strip = strip_lines(data, width), self.query_one("#strip", Static)
            strip.set_class(not lines, "-empty")
            strip.update(join(lines))
        self.query_one("#now", Static).update(join(self.layout_.lines))
        if not self.screen.has_class("-small") and not self.screen.has_class("-mid"):
            run = self.query_one("#run", Static)
            run.update(
                join(
                    right_pane(
                        data, shown.look.others, max(run.size.width, 16), max(run.size.height, 12)
                    )
                )
            )

    def _show_curves(self, shown: Shown) -> None:
        """Draws the curves again only if something changed: curves are most of the page's cost."""
        curves = self.query_one("#curves", Static)
        key = shown.key(curves.size)
        if key != self._curves_key:
            self._curves_key = key
            width, height = curves.size
            curves.update(
                join(overview_charts(shown.data, max(width, 20), max(height, 8), shown.look))
            )

    def choose(self, step: int) -> None:
        if self.shown is not None:
            data = self.shown.data
            count = len(data.live) + len(data.notable) + len(self.layout_.alerts)
            self.cursor = max(0, min(self.cursor + step, count - 1))
            self.draw(self.shown)

    def open(self) -> None:
        """Opens the chosen episode; for an alert, the list of the episodes that it is about."""
        if self.shown is None:
            return
        data, alerts = self.shown.data, self.layout_.alerts
        episodes = [row.episode_id for row in data.live] + [row.id for _, row in data.notable]
        if alerts and self.cursor >= len(episodes):
            about = panes.alert_filter(alerts[min(self.cursor - len(episodes), len(alerts) - 1)])
            self.post_message(
                self.TabWanted("episodes", about) if about else self.TabWanted("health")
            )
        elif episodes:
            self.post_message(self.Opened(episodes[min(self.cursor, len(episodes) - 1)]))

    def on_rows_chosen(self, event: Rows.Chosen) -> None:
        """A click on an episode or an alert chooses it, a second one opens it."""
        place = self.layout_.rows.get(event.row)
        if place is None or self.shown is None:
            return
        if place == self.cursor:
            self.open()
        else:
            self.cursor = place
            self.draw(self.shown)
