"""The base of the watch screen's tabs: one widget each, which shows a part of the run and answers the keys there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.text import Text
from textual.geometry import Size
from textual.message import Message
from textual.widget import Widget

from agentrl_cli.tui.common.dialogs import Prompt
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.watch.charts import Look
from agentrl_cli.tui.watch.data import WatchData
from agentrl_cli.tui.watch.recent import Recent


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page draws: the run as it was last read, its newest episodes, and how curves are drawn."""

    data: WatchData
    recent: Recent
    look: Look

    def key(self, size: Size) -> tuple[Any, ...]:
        """Changes if anything changes that a page shows: reading the store every second must cost little."""
        data = self.data
        newest = (
            len(data.steps),
            data.steps[-1:],
            data.evals,
            data.events[-1:],
            data.logs[-1:],
            data.alerts,
        )
        return (*newest, data.workers, data.health, data.run.config, self.recent, self.look, size)


class Page(Widget):
    """What every tab has beside its kind of widget: the screen calls `draw` after every look at the store, the others
    for keys."""

    NEEDS_RECENT = False
    """Whether the page shows the newest episodes."""
    HAS_CHARTS = False
    """Whether a filter of metrics keeps this page; from another one it leads to the charts."""

    class Opened(Message):
        """Open an episode in replay."""

        def __init__(self, episode_id: str) -> None:
            super().__init__()
            self.episode_id = episode_id

    class TabWanted(Message):
        """Show another tab. `filter`: for its list of episodes; None keeps the current one."""

        def __init__(self, tab: str, filter: str | None = None) -> None:
            super().__init__()
            self.tab, self.filter = tab, filter

    class MetricsFiltered(Message):
        """Charts are to show only the metrics whose name contains this."""

        def __init__(self, pattern: str) -> None:
            super().__init__()
            self.pattern = pattern

    shown: Shown | None = None

    def draw(self, shown: Shown) -> None:
        """Draws the page."""
        self.shown = shown

    def enter(self) -> None:
        """The tab was chosen."""

    def run_read(self) -> None:
        """The store has changed, or the tab was chosen: time to read what only this page shows."""

    def choose(self, step: int) -> None:
        """Moves the choice, or scrolls, by `step` lines."""

    def open(self) -> None:
        """Opens the chosen line."""

    def sort(self) -> None:
        """Takes the next order of a list."""

    def ask_filter(self) -> None:
        """Asks which metrics the charts show."""
        names = "  ".join(self.shown.data.names()[:24]) if self.shown is not None else ""
        pattern = self.shown.look.pattern if self.shown is not None else ""
        label = "metrics whose name holds (a regular expression)"

        def use(text: str) -> None:
            self.post_message(self.MetricsFiltered(text))

        self.ask(Prompt(label, pattern, help=names), use)

    def ask(self, prompt: Prompt, use: Callable[[str], None]) -> None:
        """Calls `use` with the line that was entered, unless the prompt was cancelled."""

        def entered(text: str | None) -> None:
            if text is not None:
                use(text)

        self.app.push_screen(prompt, entered)


class LinesPage(Lines, Page):
    """A page of lines that scroll; they are made again only if something changed."""

    _key: Any = None

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        """Return the lines of the page at a width."""
        raise NotImplementedError

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
