"""Two runs beside each other, or two episodes of one task: the tasks below the runs, flipped ones first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.reports.compare import RunComparison, compare_runs
from agentrl_cli.store import EpisodeRow, EvalRow
from agentrl_cli.tui.common.agent_screen import AgentScreen, LinesScreen
from agentrl_cli.tui.common.charts import chart, short
from agentrl_cli.tui.common.episode_view import Fork, place_of, token_at
from agentrl_cli.tui.common.keys import CLOSING, FINDING, moving, with_ids
from agentrl_cli.tui.common.layers import LAYERS, default_layer, layer_key
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import (
    ALARM,
    BAD,
    FAINT,
    GOOD,
    HERE,
    TITLE,
    clip,
    join,
    keep_end,
    num,
    pad,
    pad_left,
)
from agentrl_cli.tui.common.token_view import TokenView
from agentrl_cli.tui.replay.panels import fork_lines

KEYS = "j/k task  enter side by side  m all metrics  ? keys  q back"
HELP = """\
j k          down, up in the list of tasks     enter   an episode of each run, side by side
m            every metric, or the first few    q       back
/ .          find text on this page, the next match

Tasks come from the newest evaluation of each run where both have one, else from all attempts.
"""


class CompareScreen(LinesScreen):
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

    KEYS, HELP_TITLE, HELP_TEXT = KEYS, "compare", HELP

    def __init__(self, reader: Reader, before: str, after: str) -> None:
        super().__init__(reader)
        self.names = (before, after)
        self.found: RunComparison | None = None
        self.cursor = self.line = 0  # the chosen task, and its line
        self.every = False

    def on_mount(self) -> None:
        self.put_head("agentrl compare   reading …")
        self.load()

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
        width, page = max(self.size.width - 3, 40), self.page
        self.put_head(f"agentrl compare   {self.found.before.name}  with  {self.found.after.name}")
        top = top_lines(self.found, width, every=self.every)
        page.show([*top, *task_lines(self.found, width, self.cursor)])
        self.line = len(top) + 3 + self.cursor
        if self.cursor:
            page.keep_in_sight(self.line, middle=True)
        else:
            page.scroll_home(animate=False)

    def action_move(self, step: int) -> None:
        # a page scrolls where the choice is out of sight, and above the first task
        below = self.line - round(self.page.scroll_offset.y)
        hidden = below not in range(self.page.size.height) or (step < 0 and not self.cursor)
        if self.found is not None and (not self.found.tasks or (abs(step) > 1 and hidden)):
            self.action_scroll_by(step)
        elif self.found is not None:
            self.cursor = max(0, min(self.cursor + step, len(self.found.tasks) - 1))
            self.paint()

    @work(exclusive=True, group="open", exit_on_error=False)
    async def action_open(self) -> None:
        if self.found is None or not self.found.tasks:
            return
        line = self.found.tasks[self.cursor]
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
        (
            "SETTINGS",
            found.settings,
            6,
            lambda value: clip("-" if value is None else str(value), 19),
        ),
        ("METRICS, last 10 steps", found.metrics, 8, short),
        ("EVALUATIONS", found.evals, len(found.evals), _rate),
    )
    for title, rows, few, cell in tables:
        shown = rows if every else rows[:few]
        heads = pad_left(one, 20) + pad_left(two, 20)
        lines += [Text(f"{title:<34}{heads}", TITLE)] * bool(rows)
        for name, a, b in shown:
            values = pad_left(cell(a), 20) + pad_left(cell(b), 20)
            lines.append(Text(clip(f" {pad(keep_end(name, 32), 33)}{values}", width)))
    return lines


def _rate(row: EvalRow | None) -> str:
    if row is None or row.pass_rate is None:
        return "-"
    between = f" {num(row.low, '.2f')}..{num(row.high, '.2f')}" if row.low is not None else ""
    return f"{row.pass_rate:.3f}{between}"


STYLES = {"gained": GOOD, "lost": BAD}


def task_lines(found: RunComparison, width: int, cursor: int) -> list[Text]:
    """Return the tasks that both attempted."""
    lines = [Text("")]
    if not found.tasks:
        return [*lines, Text("No task was tried by both.", FAINT)]
    one = found.difference
    text = f"TASKS {len(found.tasks)} ({found.source})  solved {one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
    text += f"  {found.gained} gained  {found.lost} lost  p = {found.p_value:.3g}"
    lines.append(Text(clip(text, width), TITLE))
    lines.append(
        Text(f" {'':<7}{'task':<26}{'before':>8}{'after':>8}{'reward':>9}{'reward':>9}", FAINT)
    )
    for index, line in enumerate(found.tasks):
        row = f" {line.flip:<7}{pad(clip(line.task_id, 25), 26)}{line.before[0]:>5}/{line.before[1]:<2}"
        row += f"{line.after[0]:>5}/{line.after[1]:<2}"
        row += f"{line.reward_before:>9.2f}{line.reward_after:>9.2f}"
        style = HERE if index == cursor else STYLES.get(line.flip, "")
        lines.append(Text(clip(row, width), style, no_wrap=True))
    return lines


class VersusScreen(AgentScreen):
    """Two episodes of one task; `rows` are the choices, `sides` two indices into them."""

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        "versus",
        [
            Binding("tab", "side", "the other side"),
            Binding("j", "focused.turn(1)", "next turn", show=False),
            Binding("k", "focused.turn(-1)", "previous turn", show=False),
            Binding("right,J", "focused.token(1)", "next token", show=False),
            Binding("left,K", "focused.token(-1)", "previous token", show=False),
            Binding("down", "focused.line(1)", "a line down", show=False),
            Binding("up", "focused.line(-1)", "a line up", show=False),
            Binding("pagedown", "focused.line(15)", "a page down", show=False),
            Binding("pageup", "focused.line(-15)", "a page up", show=False),
            Binding("h", "version(-1)", "previous checkpoint", show=False),
            Binding("l", "version(1)", "next checkpoint", show=False),
            Binding("v", "fork", "fork"),
            *(
                Binding(layer_key(i), f"layer('{name}')", name, show=False)
                for i, name in enumerate(LAYERS)
            ),
            Binding("enter", "open", "open"),
            *CLOSING,
        ],
    )

    HELP_TITLE = "side by side"
    HELP_TEXT = """\
tab          the other side            h l    another checkpoint on this side
j k          next, previous turn       ← →    next, previous token      ↑ ↓ pgup pgdn  lines
v            both to the first differing token
0 … 9        layer, on both sides      enter  open this side in replay
q            back
"""

    def __init__(self, reader: Reader, rows: list[EpisodeRow], sides: tuple[int, int]) -> None:
        super().__init__(reader)
        self.rows = rows
        self.sides = list(sides)
        self.texts = TokenView(id="side0"), TokenView(id="side1")
        self.fork: Fork | None = None
        self.side = 0

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with Horizontal(id="both"):
            for side, text in enumerate(self.texts):
                yield Vertical(Static(id=f"title{side}", classes="title"), text, classes="pane")
        yield Static(id="diff")
        keys = "tab side  j/k turn  ←/→ token  h/l other checkpoint  v fork  0-9 layer  enter open  ? keys  q back"
        yield Static(Text(keys, no_wrap=True), id="keys")

    def on_mount(self) -> None:
        self.text.focus()
        self.put("head", Text("reading …"))
        self.load()

    def on_resize(self, event: Resize) -> None:
        for text in self.texts:
            text.compact = event.size.height < 30

    @property
    def text(self) -> TokenView:
        """The tokens of the side that keys move in."""
        return self.texts[self.side]

    @work(exclusive=True, group="load", exit_on_error=False)
    async def load(self) -> None:
        """Reads both episodes; the other side goes to where this one parts from it."""
        for at, text in zip(self.sides, self.texts, strict=True):
            if text.view is not None and text.view.episode.id == self.rows[at].id:
                continue
            try:
                view = await self.reader.view(self.rows[at].id)
            except AgentRLError as error:
                self.put("head", Text(error.message, ALARM))
                return
            if text.lens == "push":
                text.lens = default_layer(view.tokens, view.signals)
            text.show(view, token_at(view, None))
        left, right = (text.view for text in self.texts)
        assert left is not None and right is not None
        self.fork = await self.reader.fork(left, right.episode.id)
        self.paint()
        self.action_fork()

    def paint(self) -> None:
        """Paints the titles and the difference."""
        left = self.texts[0].view
        if left is None or self.texts[1].view is None:
            return
        count = f"{len(self.rows)} checkpoints tried this task"
        self.put_head(f"agentrl replay   {self.rows[0].task_id}   {count}")
        for side, at in enumerate(self.sides):
            row, mark = self.rows[at], "▶ " if side == self.side else "  "
            where = f"{row.kind} step {row.step}" if row.step is not None else row.kind
            text = Text(mark, HERE, no_wrap=True, overflow="ellipsis")
            text.append(row.weights_version or "?", TITLE)
            color = GOOD if str(row.outcome) == "solved" else BAD
            text.append(f"  {num(row.reward, '.2f')} {row.outcome or 'running'}", color)
            self.put(f"title{side}", text.append(f"  {where}  #{row.sample}  {row.n_tokens} tok"))
        lines = fork_lines(self.fork, left, max(self.size.width - 4, 20), ("left", "right"))
        self.put("diff", join(lines))

    def action_side(self) -> None:
        self.texts[1 - self.side].focus()

    def on_descendant_focus(self) -> None:
        self.side = int(self.texts[1].has_focus)
        self.paint()

    def action_version(self, step: int) -> None:
        """Shows another checkpoint on this side; the place in the episode stays."""
        here, other = self.sides[self.side], self.sides[1 - self.side]
        here = (here + step) % len(self.rows)
        if here == other and len(self.rows) > 2:  # the same episode twice shows nothing
            here = (here + step) % len(self.rows)
        self.sides[self.side] = here
        self.load()

    def action_layer(self, name: str) -> None:
        for text in self.texts:
            text.lens = name

    def action_fork(self) -> None:
        if self.fork is not None:
            self.texts[0].move_to(self.fork.position)
            self.texts[1].move_to(self.fork.other_position)

    def action_open(self) -> None:
        if self.text.view is not None:
            place = place_of(self.text.view, self.text.cursor)
            self.open_screen("replay", self.text.view.episode.id, place=place)
