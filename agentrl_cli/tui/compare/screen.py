"""Two runs beside each other: curves, settings, metrics, evaluations; the tasks below, flipped ones first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.reports.compare import RunComparison, TaskLine, compare_runs
from agentrl_cli.store import EvalRow
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.charts import chart, short
from agentrl_cli.tui.common.keys import CLOSING, FINDING, moving, with_ids
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, HERE, TITLE, clip, num
from agentrl_cli.tui.common.token_text import keep_end

KEYS = "j/k task  enter side by side  m all metrics  ? keys  q back"
HELP = """\
j k          down, up in the list of tasks     enter   an episode of each run, side by side
m            every metric, or the first few    q       back
/ .          find text on this page, the next match

Tasks come from the newest evaluation of each run where both have one, else from all attempts.
"""


class CompareScreen(AgentScreen):
    """`before` and `after`: runs as `store.run` takes them."""

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        "compare",
        [
            *moving("move", page=10),
            Binding("enter", "open", "side by side"),
            Binding("m", "metrics", "metrics"),
            *FINDING,
            *CLOSING,
        ],
    )

    HELP_TITLE, HELP_TEXT = "compare", HELP

    def __init__(self, reader: Reader, before: str, after: str) -> None:
        super().__init__(reader)
        self.names = (before, after)
        self.found: RunComparison | None = None
        self.cursor = 0
        self.every = False

    def compose(self) -> ComposeResult:
        yield from (
            Static(id="head"),
            Lines(id="long"),
            Static(Text(KEYS, no_wrap=True), id="keys"),
        )

    def on_mount(self) -> None:
        self.put_head("agentrl compare   reading …")
        self.load()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.paint)

    @work(exclusive=True, group="load", exit_on_error=False)
    async def load(self) -> None:
        """Compares, in the reader's thread."""
        try:
            self.found = await self.reader.call(compare_runs, *self.names)
        except AgentRLError as error:
            self.put("head", Text(f"{error.message} {error.hint}", BAD))
        self.paint()

    def paint(self) -> None:
        """Paints everything; the chosen task is kept in sight."""
        if self.found is None:
            return
        width, page = max(self.size.width - 3, 40), self.query_one(Lines)
        self.put_head(f"agentrl compare   {self.found.before.name}  with  {self.found.after.name}")
        top = top_lines(self.found, width, every=self.every)
        page.show([*top, *task_lines(self.found, width, self.cursor)])
        if self.cursor:
            page.keep_in_sight(len(top) + 3 + self.cursor, middle=True)
        else:
            page.scroll_home(animate=False)

    def action_move(self, step: int) -> None:
        if self.found is not None and not self.found.tasks:
            self.query_one(Lines).scroll_relative(y=step, animate=False)
        elif self.found is not None:
            self.cursor = max(0, min(self.cursor + step, len(self.found.tasks) - 1))
            self.paint()

    @work(exclusive=True, group="open", exit_on_error=False)
    async def action_open(self) -> None:
        if self.found is None or not self.found.tasks:
            return
        line: TaskLine = self.found.tasks[self.cursor]
        ids = (line.episode_before, line.episode_after)
        rows = await self.reader.call(lambda store: [store.episodes.row(name) for name in ids])
        self.open_screen("versus", rows, (0, 1))

    def action_metrics(self) -> None:
        self.every = not self.every
        self.paint()


def top_lines(found: RunComparison, width: int, *, every: bool) -> list[Text]:
    """Return the curves, settings, metrics and evaluations."""
    one, two = clip(found.before.name, 18), clip(found.after.name, 18)
    lines: list[Text] = []
    if any(found.curves):
        title, (dim, curve) = f"REWARD {two} (dim: {one})", found.curves
        lines += chart(title, curve, min(width, 100), 5, unit=True, others=[dim])
        lines.append(Text(""))
    tables: tuple[tuple[str, Sequence[Any], int, Callable[[Any], str]], ...] = (
        ("SETTINGS", found.settings, 6, _cell),
        ("METRICS, last 10 steps", found.metrics, 8, short),
        ("EVALUATIONS", found.evals, len(found.evals), _rate),
    )
    for title, rows, few, cell in tables:
        shown = rows if every else rows[:few]
        lines += [Text(f"{title:<34}{one:>20}{two:>20}", TITLE)] * bool(rows)
        cells = ((keep_end(name, 32), cell(a), cell(b)) for name, a, b in shown)
        lines += [Text(clip(f" {name:<33}{a:>20}{b:>20}", width)) for name, a, b in cells]
    return lines


def _cell(value: object) -> str:
    return clip("-" if value is None else str(value), 19)


def _rate(row: EvalRow | None) -> str:
    if row is None or row.pass_rate is None:
        return "-"
    between = f" {num(row.low, '.2f')}..{num(row.high, '.2f')}" if row.low is not None else ""
    return f"{row.pass_rate:.3f}{between}"


STYLES = {"gained": GOOD, "lost": BAD}


def task_lines(found: RunComparison, width: int, cursor: int) -> list[Text]:
    """Return the tasks that both attempted."""
    lines = [Text("")]
    if found.difference is None:
        return [*lines, Text("No task was tried by both.", FAINT)]
    value, low, high = found.difference
    text = (
        f"TASKS {len(found.tasks)} ({found.source})  solved {value:+.3f} [{low:+.3f}, {high:+.3f}]"
    )
    text += f"  {found.gained} gained  {found.lost} lost  p = {found.p_value:.3g}"
    lines.append(Text(clip(text, width), TITLE))
    lines.append(
        Text(f" {'':<7}{'task':<26}{'before':>8}{'after':>8}{'reward':>9}{'reward':>9}", FAINT)
    )
    for index, line in enumerate(found.tasks):
        row = f" {line.flip:<7}{line.task_id[:25]:<26}{line.before[0]:>5}/{line.before[1]:<2}"
        row += f"{line.after[0]:>5}/{line.after[1]:<2}"
        row += f"{line.reward_before:>9.2f}{line.reward_after:>9.2f}"
        style = HERE if index == cursor else STYLES.get(line.flip, "")
        lines.append(Text(clip(row, width), style, no_wrap=True))
    return lines
