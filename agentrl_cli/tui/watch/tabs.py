"""The tabs of the watch screen."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual.widgets import Static

TABS = ("overview", "charts", "episodes", "groups", "tokens", "tools", "log", "config", "health")


class TabBar(Static):
    """Every tab with its number in one line, and the state of the screen after them; a click shows a tab."""

    auto_links = False
    """A tab is not painted as a link."""

    _shown: tuple[str, str, bool] | None = None

    def show(self, current: str, state: str, *, short: bool) -> None:
        """Marks the current tab; `short`: names of three letters, for small terminals."""
        if self._shown == (current, state, short):
            return
        self._shown = (current, state, short)
        line = Text(style="#8a8a8a", no_wrap=True)
        for number, tab in enumerate(TABS, 1):
            name = tab.capitalize()
            label = f"[{number} {name}]" if tab == current else f" {number} {name[:3] if short else name}"
            line.append(label, Style(meta={"@click": f"screen.tab('{tab}')"}))
            line.append(" ")
        self.update(line.append(f"  {state}"), layout=False)
