"""Every metric of a run as curves, over another run's, on a log axis, zoomed, filtered. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from agentrl_cli.tui.common.charts import chart, short
from agentrl_cli.tui.common.text import FAINT
from agentrl_cli.tui.watch import panels as panes
from agentrl_cli.tui.watch.data import WatchData

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
    other: WatchData | None = None
    """An earlier run, drawn dim under the curves."""

    def matches(self, name: str) -> bool:
        """Whether a metric is shown."""
        try:
            return re.search(self.pattern or self.tab, name, re.IGNORECASE) is not None
        except re.error:
            return self.pattern.lower() in name.lower()

    def only(self, pattern: str) -> Look:
        """The same look over the metrics of one tab; the reader's own pattern wins."""
        return self if self.pattern else replace(self, tab=pattern)

    def window(self, newest: float) -> tuple[float, float]:
        """(after, until): the steps that are shown."""
        if not self.last:
            return -math.inf, math.inf
        until = max(newest - self.back * self.last, min(self.last, newest))
        return until - self.last, until

    def zoomed(self) -> Look:
        """The next of: all steps, the last 100, 30, 10."""
        return replace(self, back=0, last=ZOOMS[(ZOOMS.index(self.last) + 1) % len(ZOOMS)])

    def smoother(self) -> Look:
        """Averaged over the next of SMOOTH."""
        return replace(self, smooth=SMOOTH[(SMOOTH.index(self.smooth) + 1) % len(SMOOTH)])

    def moved(self, step: int, newest: int) -> Look:
        """One window of steps earlier (−1) or later (+1); a look at all steps is zoomed first."""
        last = self.last or ZOOMS[1]
        most = max(int((newest - 1) // last), 0)
        return replace(self, last=last, back=max(0, min(self.back - step, most)))

    def describe(self) -> str:
        """The settings that differ from the default, in a few words."""
        parts = [f"metrics with {self.pattern!r}"] if self.pattern else []
        parts += ["log axis"] if self.log else []
        if self.last:
            parts.append(f"last {self.last} steps" if not self.back else f"{self.last} steps, {self.back} windows back")
        parts += [f"mean of {self.smooth} steps"] if self.smooth > 1 else []
        parts += [f"dim: {self.other.run.name}"] if self.other is not None else []
        return "   ".join(parts)


Series = list[tuple[float, float]]


def cut(series: Series, look: Look, end: float) -> Series:
    """The part of a curve that the zoom shows, smoothed; `end` is the newest step."""
    after, until = look.window(end)
    return [point for point in smoothed(series, look.smooth) if after < point[0] <= until]


def smoothed(series: Series, steps: int) -> Series:
    """Each value as the mean of the last `steps` values."""
    if steps <= 1:
        return series
    values = [y for _, y in series]
    return [(x, sum(values[max(n - steps + 1, 0) : n + 1]) / min(n + 1, steps)) for n, (x, _) in enumerate(series)]


WIDE = 157
"""From this width on (a terminal of 160 columns) there are two charts more in a row."""


def chart_grid(data: WatchData, width: int, height: int = 6, look: Look | None = None, columns: int = 0) -> list[Text]:
    """Every metric as a curve: two a row, four on a wide terminal, or `columns`."""
    look = look or Look()
    columns = columns or max(width // 40, 4 if width >= WIDE else 1)
    inner = width // columns - 2
    marks, end = panes.control_steps(data), float(data.step)
    blocks: list[list[Text]] = []

    def add(name: str, series: Series, other: Series, unit: bool = False) -> None:
        shown, dim = cut(series, look, end), cut(other, look, end)
        title = f"{name} {short(series[-1][1] if series else None)}"
        if look.other is not None:
            at = [y for x, y in other if x <= end]
            title += f" vs {short(at[-1] if at else None)}"
        blocks.append(chart(title, shown, inner, height, marks=marks, other=dim, unit=unit, log=look.log))

    for name in data.names():
        if look.matches(name) or look.matches(data.key(name)):
            add(name, data.series(name), look.other.series(name) if look.other is not None else [])
    evals = panes.eval_series(data)
    if evals and look.matches("eval"):
        add("eval", evals, panes.eval_series(look.other) if look.other is not None else [], unit=True)
        blocks.insert(min(1, len(blocks) - 1), blocks.pop())
    if not blocks:
        return [Text("No metric has such a name." if look.pattern else "No step has finished yet.", FAINT)]
    lines: list[Text] = [Text(look.describe(), FAINT)] if look.describe() else []
    for start in range(0, len(blocks), columns):
        lines += [*beside(blocks[start : start + columns], inner + 2), Text("")]
    return lines


def beside(blocks: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Blocks of lines side by side, each at least `width` cells wide."""
    lines = []
    for at in range(max(len(block) for block in blocks)):
        line = Text(no_wrap=True)
        for block in blocks:
            part = block[at].copy() if at < len(block) else Text("")
            part.pad_right(max(width - part.cell_len, 0))
            line.append_text(part)
        lines.append(line)
    return lines
