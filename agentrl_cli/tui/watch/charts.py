"""Every metric of a run as curves, over another run's, on a log axis, zoomed, filtered. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from agentrl_cli.reports.reference import smooth
from agentrl_cli.reports.run_data import RunData, Series
from agentrl_cli.tui.common.charts import OVER, chart, short
from agentrl_cli.tui.common.text import FAINT, wrap
from agentrl_cli.tui.watch import panels

ZOOMS = (0, 100, 30, 10)
"""How many of the last steps are shown; 0: all."""
SMOOTH = (1, 5, 20)


@dataclass(frozen=True, slots=True)
class Look:
    """How the curves are drawn; frozen, so that a change is a new look."""

    pattern: str = ""
    """Only metrics whose name contains this: a regular expression, or plain text if it is not a valid one."""
    tab: str = ""
    """The metrics of the tab, used while `pattern` is empty."""
    log: bool = False
    last: int = 0
    back: int = 0
    """Windows of `last` steps between the shown one and the newest step."""
    smooth: int = 1
    """Steps over which a curve is averaged."""
    others: tuple[RunData, ...] = ()
    """Other runs, drawn under the curves."""

    def matches(self, name: str) -> bool:
        """Whether a metric is shown."""
        try:
            return re.search(self.pattern or self.tab, name, re.IGNORECASE) is not None
        except re.error:
            return self.pattern.lower() in name.lower()

    def only(self, pattern: str) -> Look:
        """Return the same look over the metrics of one tab; the reader's own pattern wins."""
        return self if self.pattern else replace(self, tab=pattern)

    def window(self, newest: float) -> tuple[float, float]:
        """Return (after, until), the steps that are shown."""
        if not self.last:
            return -math.inf, math.inf
        until = max(newest - self.back * self.last, min(self.last, newest))
        return until - self.last, until

    def zoom(self) -> Look:
        """Show the next of: all steps, the last 100, 30, 10."""
        return replace(self, back=0, last=ZOOMS[(ZOOMS.index(self.last) + 1) % len(ZOOMS)])

    def smoother(self) -> Look:
        """Take the mean over the next number of steps in SMOOTH."""
        return replace(self, smooth=SMOOTH[(SMOOTH.index(self.smooth) + 1) % len(SMOOTH)])

    def move(self, step: int, newest: int) -> Look:
        """Move one window of steps earlier (−1) or later (+1); a look at all steps is zoomed first."""
        last = self.last or ZOOMS[1]
        most = max(int((newest - 1) // last), 0)
        return replace(self, last=last, back=max(0, min(self.back - step, most)))

    def describe(self) -> str:
        """Return the settings that differ from the default, in a few words."""
        back = f"{self.last} steps, {self.back} windows back"
        parts = (
            f"metrics with {self.pattern!r}" if self.pattern else "",
            "log axis" if self.log else "",
            (back if self.back else f"last {self.last} steps") if self.last else "",
            f"mean of {self.smooth} steps" if self.smooth > 1 else "",
        )
        return "   ".join(filter(None, parts))

    def legend(self, data: RunData) -> list[Text]:
        """Return the settings, and the names of the other curves in their colours; no line without any."""
        line = Text(self.describe(), FAINT, no_wrap=True)
        line.append(
            "   ⠒ the range of the reference curves of this pack" * bool(data.band("solved"))
        )
        for n, other in enumerate(self.others):
            line.append(f"   ⠒ {other.run.name}", OVER[n % len(OVER)])
        return [line] if line.plain else []


def cut(series: Series, look: Look, end: float) -> Series:
    """Return the part of a curve that the zoom shows, smoothed; `end` is the newest step."""
    after, until = look.window(end)
    means = smooth([y for _, y in series], look.smooth)
    return [(x, mean) for (x, _), mean in zip(series, means, strict=True) if after < x <= until]


WIDE = 157
"""Least width (a terminal of 160 columns) for two more charts in a row."""


def chart_grid(data: RunData, width: int, height: int = 6, look: Look | None = None) -> list[Text]:
    """Return every metric as a curve: two a row, four on a wide terminal."""
    look = look or Look()
    columns = max(width // 40, 4 if width >= WIDE else 1)
    names = [name for name in data.names() if look.matches(name) or look.matches(data.key(name))]
    if panels.eval_series(data) and look.matches("eval"):
        names.insert(min(1, len(names)), EVAL)
    if not names:
        why = "No metric has such a name." if look.pattern else "No step has finished yet."
        return [Text(why, FAINT)]
    lines = look.legend(data)
    for start in range(0, len(names), columns):
        blocks = [
            one_chart(data, name, width // columns - 2, height, look)
            for name in names[start : start + columns]
        ]
        lines += [*beside(blocks, width // columns), Text("")]
    return lines


EVAL = "eval"
"""The curve of the evaluations, which are not metrics of steps."""


def one_chart(
    data: RunData, name: str, width: int, height: int, look: Look, title: str = ""
) -> list[Text]:
    """Return the curve of one metric over the steps that the look shows, and over the other runs."""
    end, mine = float(data.step), _points(data, name)
    theirs = [_points(other, name) for other in look.others]
    text = f"{title or name} {short(mine[-1][1] if mine else None)}"
    at = [[y for x, y in other if x <= end] for other in theirs]
    if any(at):
        text += " vs " + " ".join(short(values[-1] if values else None) for values in at)
    dim = [cut(other, look, end) for other in (*theirs, *data.band(name))]
    marks = panels.control_steps(data) if name != EVAL else []
    unit = name in UNIT
    return chart(
        text, cut(mine, look, end), width, height, marks=marks, others=dim, unit=unit, log=look.log
    )


UNIT = frozenset({EVAL, "reward", "solved", "all_solved", "all_failed", "zero_std"})
"""Drawn between 0 and 1 at least."""


def _points(data: RunData, name: str) -> Series:
    return panels.eval_series(data) if name == EVAL else data.series(name)


NARROWEST = 25
"""Cells of a chart on the overview."""
ASIDE = re.compile(
    r"^(lr|seconds|time/.*|rewards/.*/std|num_tokens|outcomes/.*|facts/.*|flags/.*)$"
)
"""Metrics that the overview leaves to the page of charts."""


def overview_charts(data: RunData, width: int, height: int, look: Look) -> list[Text]:
    """Return as many curves as the middle of the overview has room for; those that do not move are named under them."""
    shown = look.matches if look.pattern else lambda name: not ASIDE.match(name)
    names = [name for name in data.names() if shown(name)]
    names = [name for name in (*names[:1], EVAL, *names[1:]) if _points(data, name)]
    flat = [name for name in names if not _moves(data, name)]
    names = [name for name in names if name not in flat]
    titles = [name.removeprefix("rewards/").removesuffix("/mean") for name in flat]
    still = [
        f"{panels.TITLES.get(title, title)} {short(points[-1][1])}{' (one value)' * (len(points) < 2)}"
        for points, title in zip((_points(data, name) for name in flat), titles, strict=True)
    ]
    if not data.has_reference and "kl" not in names and data.steps:
        still.insert(0, "KL no reference model")
    head = "no curve yet: " if not names else "does not move: "
    parts = wrap(head + ",  ".join(still), width - 1) if still else []
    lines, under = look.legend(data), [Text(part, FAINT, no_wrap=True) for part in parts]
    if not names:
        first = Text("No step has finished yet: the first curves need two.", FAINT)
        return [*lines, *(under or [first])]
    most = max(min(width // NARROWEST, len(names)), 1)
    room = height - len(lines) - min(len(under), 2)
    rows = max(min(-(-len(names) // most), room // 6), 1)
    columns = min(-(-len(names) // rows), most)  # rows of about the same length
    each, extra = divmod(room, rows)
    for row in range(rows):
        tall, wide = max(min(each + (row < extra), 14) - 2, 2), width // columns
        blocks = [
            one_chart(data, name, wide - 1, tall, look, panels.TITLES.get(name, name))
            for name in names[row * columns : (row + 1) * columns]
        ]
        lines += beside(blocks, wide)
    return [*lines, *under][:height]


def _moves(data: RunData, name: str) -> bool:
    """Whether a metric has a curve to draw: two values that differ; reward and evaluations always, with two values."""
    values = [y for _, y in _points(data, name)]
    return len(values) > 1 and (name in ("reward", EVAL) or max(values) - min(values) > 1e-9)


def beside(blocks: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Return blocks of lines side by side, each at least `width` cells wide."""
    lines = []
    for at in range(max(len(block) for block in blocks)):
        line = Text(no_wrap=True)
        for block in blocks:
            part = block[at].copy() if at < len(block) else Text("")
            part.pad_right(max(width - part.cell_len, 0))
            line.append_text(part)
        lines.append(line)
    return lines
