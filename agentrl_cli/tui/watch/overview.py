"""The overview of watch: episodes and alerts, curves, facts of the run, a strip of log; by the terminal's size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from agentrl_cli.reports.run_data import RunData, count_kinds
from agentrl_cli.tui.common.charts import bar, short, span, sparkline
from agentrl_cli.tui.common.lines import Rows
from agentrl_cli.tui.common.text import (
    BAD,
    FAINT,
    GOOD,
    HERE,
    TITLE,
    join,
    keep_end,
    line,
    num,
    pad,
    wrap,
)
from agentrl_cli.tui.watch import panels
from agentrl_cli.tui.watch.charts import overview_charts
from agentrl_cli.tui.watch.page import Page, Shown
from agentrl_cli.types import FAULTS

Row = tuple[Text, int | None]
"""A line, and the place of the cursor that it is: running episodes, then notable ones, then alerts."""
SMALL = ("reward", "loss", "entropy", "zero_std", "tool_errors", "kl")
"""The curves of a small terminal."""
PHASES = {"processing_tools": "tool", "generating": "model", "interacting": "user"}
STRIP = 3
"""Lines of log under the overview."""
ABOUT = {
    "truncated": "flag:TRUNC",
    "mask": "flag:MASK",
    "drift": "flag:DRIFT",
    "errors": f"outcome:{','.join(FAULTS)},drift",
    "ungraded": "outcome:ungraded",
    "bad_tokens": "fact:skipped:bad_tokens",
}
"""Alerts about some episodes of their step only, as a filter."""


def _plain(lines: Sequence[Text]) -> list[Row]:
    return [(text, None) for text in lines]


def now_rows(data: RunData, width: int, limit: int, cursor: int) -> list[Row]:
    """Return the current step: progress and the running episodes."""
    title, alive = Text("NOW ", TITLE, no_wrap=True), data.run.alive
    if alive and data.evaluating:
        title.append(f"EVALUATION after step {data.step}: {data.done} done, {len(data.live)} run")
    elif alive and data.live:
        total = data.wanted or data.done + len(data.live)
        done = bar(data.done / max(total, 1), min(max(width - 30, 6), 24))
        title.append(f"step {data.step + 1}  ROLLOUT {done} {data.done}/{total}")
    elif data.paused:
        title.append(f"paused after step {data.step}: p resumes", BAD)
    else:
        idle = "no episode runs: scoring, updating or saving"
        title.append(idle if alive else data.run.state, FAINT)
    rows, wide = _plain([title]), width >= 60
    rows += _plain([line(f"waits for {text}", width, BAD) for text in data.waits[:1]])
    task, kind = (18, 11) if wide else (max(width - 21, 4), 5)
    if data.live and limit:
        columns = f"  # {'task':<{task}} {'turn' if wide else 'tr'} {'phase':<{kind}}    time"
        rows += _plain([line(columns, width, FAINT)])
    first = max(0, min(cursor - limit // 2, len(data.live) - limit))
    for index, row in list(enumerate(data.live))[first : first + limit]:
        seconds = max((data.read if alive else row.updated) - row.started, 0.0)
        name, phase = keep_end(row.task_id, task), PHASES.get(row.state, row.state)[:kind]
        text = f"{row.sample:>3} {pad(name, task)} {row.turn:>{4 if wide else 2}} {phase:<{kind}}"
        text += f" {span(seconds):>7}"
        room = width - cell_len(text) - 2
        tail = keep_end(" ".join(row.text.split())[-room:], room) if wide else ""
        rows.append((Text(f"{text}  {tail}".rstrip(), no_wrap=True), index))
    more = [Text(f"    … {len(data.live)} run", FAINT)] if len(data.live) > limit else []
    return rows + _plain(more)


def live_lines(data: RunData, width: int, limit: int, cursor: int) -> list[Text]:
    """Return the chosen running episode: the end of its newest text in at most `limit` lines."""
    if cursor >= len(data.live) or limit < 1:
        return []
    row = data.live[cursor]
    title = f"LIVE #{row.sample} {row.task_id}  turn {row.turn}  {row.state}   enter opens it"
    parts = [part for text in row.text.splitlines() for part in wrap(text, width - 2)]
    parts = parts[-limit:] or ["its first turn is being generated"]
    style = "" if row.text.strip() else FAINT
    return [line(title, width, TITLE), *(Text(f"  {part}", style, no_wrap=True) for part in parts)]


def notable_rows(data: RunData, width: int) -> list[Row]:
    """Return episodes of the last step that are worth opening."""
    rows = _plain([Text(f"LAST STEP ({data.step}), worth a look", TITLE, no_wrap=True)])
    if not data.notable:
        return rows + _plain([Text("  no finished step yet", FAINT)])
    most = min(18, max(width - 28, 6))
    room = max(cell_len(keep_end(row.task_id, most)) for _, row in data.notable)
    for place, (why, row) in enumerate(data.notable, len(data.live)):
        text = f" {why:<6}{pad(keep_end(row.task_id, most), room)} #{row.sample:<2}"
        text += f" {num(row.reward, '5.2f')} {num(row.advantage):>5} {row.n_turns:>2}t"
        rows.append((line(f"{text} {' '.join(row.flags)}".rstrip(), width), place))
    counted = "  ".join(f"{name} x{count}" for name, count in data.flags)
    lines = [line(f" flags {counted}   x lists them", width, FAINT)] * bool(counted)
    flat, kinds = sum(bool(group.kind) for group in data.groups), count_kinds(data.groups)
    text = f"{flat} of {len(data.groups)} groups teach nothing{f': {kinds}' if kinds else ''}"
    lines += [Text(f" {part}", FAINT, no_wrap=True) for part in wrap(text, width - 1)]
    return rows + _plain(lines if data.groups else lines[: bool(counted)])


def alert_rows(data: RunData, width: int, limit: int) -> list[Row]:
    """Return the newest kinds of alerts, each once."""
    first, lines = len(data.live) + len(data.notable), panels.log_lines(
        data.alerts, "ALERTS", width, limit
    )  # fmt: skip
    return [
        (text, first + n if n >= 0 and data.alerts else None) for n, text in enumerate(lines, -1)
    ]


def wide(data: RunData, width: int, height: int, cursor: int) -> list[Row]:
    """Return the left pane of a large terminal."""
    rows = now_rows(data, width, max(min(len(data.live), height - 24), 2), cursor)
    rows += [(Text(""), None)]
    if data.notable:
        rows += [*notable_rows(data, width), (Text(""), None)]
    if data.alerts:
        rows += [*alert_rows(data, width, 4), (Text(""), None)]
    # last: nothing above moves with the cursor
    return rows + _plain(live_lines(data, width, height - len(rows), cursor))


def small(data: RunData, width: int, height: int, cursor: int) -> list[Row]:
    """Draws 80x24: curves of one line, then as many running and notable episodes and alerts as fit."""
    curves, alerts = small_lines(data, width), alert_rows(data, width, 2)
    room = height - len(curves) - len(alerts)
    limit = max(min(len(data.live), 6, room - 3), 0) if cursor < len(data.live) else 0
    now = now_rows(data, width, limit, cursor)
    left = max(room - len(now), 0)
    return [*_plain(curves), *now, *notable_rows(data, width)[: left if left > 1 else 0], *alerts]


def tiny(data: RunData, width: int, height: int) -> list[Row]:
    """Draws below 80x20: the plain line of each of the last steps."""
    lines = [line(panels.step_line(row), width) for row in data.steps[-max(height - 1, 1) :]]
    more = line("a larger terminal shows more", width, FAINT)
    return _plain([*(lines or [Text("no step has finished yet", FAINT)]), more])


def small_lines(data: RunData, width: int) -> list[Text]:
    """Return the overview of a small terminal: six curves of a line each."""
    lines = []
    curves = [(panels.TITLES[name], data.series(name)) for name in SMALL]
    for name, series in [*curves, ("EVAL", panels.eval_series(data))]:
        if series:
            text = Text(f"{name:<12} {short(series[-1][1]):>7} ", no_wrap=True)
            text.append(sparkline([y for _, y in series], max(width - 22, 8)))
            text.stylize(GOOD, 0 if name == "EVAL" else 21)
            lines.append(text)
    return lines


def summary(data: RunData, width: int) -> list[Text]:
    """Return the right pane in three lines, for terminals without room for it: run, time and store, health."""
    run, times, stored, health = (
        [text.plain.strip() for text in lines(data, 200)]
        for lines in (panels.run_lines, panels.time_lines, panels.store_lines, panels.health_lines)
    )
    waiting = [f"waiting: {', '.join(data.pending)}"] if data.pending else []
    rows = (
        [text for text in run if "[" not in text],
        [*(" ".join(text.split()[:3]) for text in times), *stored],
        [*waiting, *health[:-1]],
    )
    return [line("  ".join(row), width, TITLE if n == 0 else "") for n, row in enumerate(rows)]


def right_pane(data: RunData, others: Sequence[RunData], width: int, height: int) -> list[Text]:
    """Return the right pane: the run, health, controls, and as much of the rest as fits.

    The order of the blocks is fixed; if there is too little room, the least important are left out.
    """
    health = panels.health_lines(data, width)
    top = any(check.level == "done" for check in data.health)
    parts = [  # the higher the number, the earlier it is left out
        (0, [*(health if top else []), *panels.run_lines(data, width)]),
        (3, panels.time_lines(data, width)),
        (5, panels.part_lines(data, width)),
        (4, panels.histogram_lines(data.advantages, width)),
        (2, panels.store_lines(data, width)),
        (0, [] if top else health),
        (1, panels.compare_lines(data, others, width)),
        (0, panels.control_lines(data, width)),
    ]
    parts = [(place, lines) for place, lines in parts if lines]
    while sum(len(lines) + 1 for _, lines in parts) - 1 > height and any(p for p, _ in parts):
        parts.remove(max(parts, key=lambda part: part[0]))
    return [text for _, lines in parts for text in (*lines, Text(""))][:-1]


class OverviewPage(Vertical, Page):
    """The tab that watch opens with; running and notable episodes and alerts can be chosen."""

    cursor = 0
    rows: Sequence[Row] = ()
    _curves_key: Any = None

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Vertical(Rows(id="now"), id="left", classes="pane")
            yield Static(id="curves", classes="pane")
            yield Static(id="run", classes="pane")
        yield Static(id="strip", classes="pane")

    def draw(self, shown: Shown) -> None:
        super().draw(shown)
        data, size, screen = shown.data, self.query_one("#left").size, self.screen
        width, height = max(screen.size.width - 4, 20), max(size.height, 4)
        if screen.has_class("-tiny"):
            self.rows = tiny(data, width, height)
        elif screen.has_class("-small"):
            self.rows = small(data, width, height, self.cursor)
        else:
            self.rows = wide(data, max(size.width, 20), max(size.height, 12), self.cursor)
            self._show_beside(shown, width)
        for text, place in self.rows:
            if place == self.cursor:
                text.style = HERE
        self.query_one("#now", Rows).show([text for text, _ in self.rows])

    def _show_beside(self, shown: Shown, width: int) -> None:
        """Draws curves, run and log; the curves only if something changed: they are most of the page's cost."""
        names = ("#curves", "#run", "#strip")
        curves, run, strip = (self.query_one(name, Static) for name in names)
        if (key := shown.key(curves.size)) != self._curves_key:
            self._curves_key, (wide, tall) = key, curves.size
            lines = overview_charts(shown.data, max(wide, 20), max(tall, 8), shown.look)
            curves.update(join(lines))
        if not self.screen.has_class("-mid"):
            room = max(run.size.width, 16), max(run.size.height, 12)
            run.update(join(right_pane(shown.data, shown.look.others, *room)))
        newest = [*shown.data.logs[-STRIP:], *shown.data.alerts[-STRIP:]]
        newest = sorted(newest, key=lambda row: float(row["at"]))
        lines = panels.log_lines(newest, "", width, STRIP)[1:] if newest else []
        strip.set_class(not lines, "-empty")
        strip.update(join(lines))

    def choose(self, step: int) -> None:
        if self.shown is not None:
            places = [place for _, place in self.rows if place is not None]
            last = max([*places, len(self.shown.data.live) + len(self.shown.data.notable) - 1])
            self.cursor = max(0, min(self.cursor + step, last))
            self.draw(self.shown)

    def open(self) -> None:
        """Opens the chosen episode; for an alert, the list of the episodes that it is about."""
        if self.shown is None:
            return
        data = self.shown.data
        episodes = [row.episode_id for row in data.live] + [row.id for _, row in data.notable]
        shown = [place for _, place in self.rows if place is not None and place >= len(episodes)]
        alerts = data.alerts[-len(shown) :]
        if self.cursor >= len(episodes) and data.alerts:
            alert = alerts[min(self.cursor - len(episodes), len(alerts) - 1)]
            parts = [f"step:{alert.get('last_step')}", ABOUT.get(str(alert["name"]), "")]
            named = alert.get("last_step")  # without a step it is about no episodes
            wanted = ("episodes", " ".join(parts).strip()) if named else ("health",)
            self.post_message(self.TabWanted(*wanted))
        elif episodes:
            self.host.open_screen("replay", episodes[min(self.cursor, len(episodes) - 1)])

    def on_rows_chosen(self, event: Rows.Chosen) -> None:
        """Chooses an episode or alert on a click, opens it on a second one."""
        place = self.rows[event.row][1] if event.row < len(self.rows) else None
        if place is not None and place == self.cursor:
            self.open()
        elif place is not None:
            self.choose(place - self.cursor)
