"""The tabs of the watch screen."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual.widgets import Static

TABS = ("overview", "charts", "episodes", "groups", "tokens", "tools", "log", "config", "health")
WORKERS = "workers"
"""A tab more, on w, for runs whose episodes workers make."""


class TabBar(Static):
    """Every tab with its number in one line, and the state of the screen after them; a click shows a tab."""

    auto_links = False
    """A tab is not painted as a link."""

    _shown: tuple[str, str, bool, bool] | None = None

    def show(self, current: str, state: str, *, short: bool, workers: bool = False) -> None:
        """Marks the current tab; `short`: names of three letters, for small terminals; `workers`: the run has some."""
        if self._shown == (current, state, short, workers):
            return
        self._shown = (current, state, short, workers)
        line = Text(style="#8a8a8a", no_wrap=True)
        tabs = [(str(number), tab) for number, tab in enumerate(TABS, 1)]
        for key, tab in [*tabs, ("w", WORKERS)] if workers or current == WORKERS else tabs:
            name = tab.capitalize()
            label = f"[{key} {name}]" if tab == current else f" {key} {name[:3] if short else name}"
            line.append(label, Style(meta={"@click": f"screen.tab('{tab}')"}))
            line.append(" ")
        self.update(line.append(f"  {state}"), layout=False)
