"""The base of the watch screen's tabs, one widget each, and the newest episodes by group that some of them show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rich.text import Text
from textual.geometry import Size
from textual.message import Message
from textual.widget import Widget

from agentrl_cli.reports.run_data import GroupRow, RunData, count_kinds, group_rows
from agentrl_cli.store import Store
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.watch.charts import Look

NEWEST = 640
"""Episodes of a run, from the newest, that are looked at."""


@dataclass(frozen=True, slots=True)
class Fold:
    """The groups of a step without spread, in one line."""

    step: int
    groups: tuple[GroupRow, ...]
    open: bool
    """Whether they follow it."""

    def text(self) -> str:
        """Return `v  120 5 groups without signal: 3 all solved, 2 all failed`."""
        mark, plural = "v" if self.open else ">", "s" * (len(self.groups) > 1)
        count = f"{len(self.groups)} group{plural} without signal: {count_kinds(self.groups)}"
        return f"{mark} {self.step:>5} {count}"


def fold_groups(groups: Sequence[GroupRow], open_steps: Collection[int]) -> list[GroupRow | Fold]:
    """Return the rows of the page of groups: by step those with spread, then a line for the others."""
    out: list[GroupRow | Fold] = []
    for step in dict.fromkeys(group.step for group in groups):
        flat = tuple(group for group in groups if group.step == step and group.kind)
        out += [group for group in groups if group.step == step and not group.kind]
        if flat:
            shown = step in open_steps
            out += [Fold(step, flat, shown), *(flat if shown else ())]
    return out


@dataclass(frozen=True, slots=True)
class Recent:
    """The data of those pages beyond `RunData`."""

    groups: tuple[GroupRow, ...] = ()
    lengths: tuple[int, ...] = ()
    """Sampled tokens of the episodes of the run's last finished step."""
    dispositions: tuple[tuple[str, int], ...] = ()
    """(disposition, count) of those episodes: trained, or skipped and why."""
    tools: tuple[Sequence[Any], ...] = ()
    since: int = 0
    """The first step that `tools` counts."""


def load_recent(store: Store, run_id: str) -> Recent:
    """Return the newest episodes of a run by group, and its tools (in the reader's thread)."""
    rows = store.episodes.used("kind:train", "-step", run_id, limit=NEWEST)
    finished = store.runs.get(run_id).step
    last = [row for row in rows if row.step == finished and row.outcome is not None]
    since = max(finished - 19, 0)
    return Recent(
        group_rows(rows),
        tuple(row.n_model_tokens for row in last),
        tuple(Counter(row.fact or "not yet decided" for row in last).most_common()),
        tuple(store.stats.tools(run_id, since)),
        since,
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """The content of a page: the run as it was last read, its newest episodes, and how curves are drawn."""

    data: RunData
    recent: Recent
    look: Look

    def key(self, size: Size) -> tuple[Any, ...]:
        """Return a value that changes with anything a page shows: a look every second must cost little."""
        data = self.data
        newest = data.steps[-1:], data.events[-1:], data.logs[-1:], data.evals, data.alerts
        return (*newest, len(data.steps), data.workers, data.silent, data.health, data.run.config,
                self.recent, self.look, size)  # fmt: skip


class Page(Widget):
    """A tab, beside its kind of widget: the screen calls `draw` after every look at the store, the others for keys."""

    needs_recent = False
    """Whether the page shows the newest episodes."""
    has_charts = False
    """Whether a filter of metrics keeps this page; from another one it leads to the charts."""
    shown: Shown | None = None

    @dataclass
    class TabWanted(Message):
        """Show another tab. `filter`: for its list of episodes; None keeps the current one."""

        tab: str
        filter: str | None = None

    @property
    def host(self) -> AgentScreen:
        """The screen of this tab."""
        return cast(AgentScreen, self.screen)

    def draw(self, shown: Shown) -> None:
        """Draws the page."""
        self.shown = shown

    def enter(self) -> None:
        """Scrolls to the place that the page opens at: its tab was chosen."""

    def read_again(self) -> object:
        """Reads the data of this page alone, after a change of the store or when the tab is chosen."""

    def choose(self, step: int) -> None:
        """Moves the choice, or scrolls, by `step` lines."""

    def open(self) -> None:
        """Opens the chosen line."""

    def sort(self) -> None:
        """Takes the next order of a list."""

    def ask_filter(self) -> bool:
        """Ask what this page shows. Returns False if it shows metrics, or everything."""
        return False


class LinesPage(Lines, Page):
    """A page of lines that scroll; they are made again only if something changed."""

    _key: Any = None

    def __init__(
        self,
        id: str,
        lines: Callable[[Shown, int], list[Text]] | None = None,
        *,
        recent: bool = False,
        charts: bool = False,
    ) -> None:
        """`lines` returns the page at a width; a subclass may have them as `lines_of`."""
        super().__init__(id=id)
        self.needs_recent, self.has_charts = recent, charts
        self._lines = lines

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        """Return the lines of the page at a width."""
        return self._lines(shown, width) if self._lines is not None else []

    def draw(self, shown: Shown) -> None:
        super().draw(shown)
        key = shown.key(self.screen.size)
        if key != self._key:
            self._key = key
            self.show(self.lines_of(shown, max(self.screen.size.width - 3, 30)))

    def draw_again(self) -> None:
        """Draws the page after a change of its own."""
        self._key = None
        if self.shown is not None:
            self.draw(self.shown)

    def enter(self) -> None:
        self.scroll_home(animate=False, immediate=True)

    def choose(self, step: int) -> None:
        self.scroll_relative(y=step, animate=False)
