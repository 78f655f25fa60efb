"""The page of watch with the run's episodes."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from agentrl_cli.tui.common.episode_list import EpisodeList
from agentrl_cli.tui.common.text import ALARM
from agentrl_cli.tui.watch.page import Page


class EpisodesPage(EpisodeList, Page):
    """The run's episodes by a filter and an order."""

    def run_read(self) -> None:
        self.read_again()

    def choose(self, step: int) -> None:
        self.table.move_to(self.table.cursor + step)

    def open(self) -> None:
        self.table.open_current()

    def sort(self) -> None:
        self.next_sort()
        self.notify(f"sort {self.browse.sort}", timeout=2)

    def on_episode_list_listed(self, event: EpisodeList.Listed) -> None:
        """Shows what is wrong with the filter in place of the column titles."""
        if event.error:
            self.query_one("#columns", Static).update(Text(event.error, ALARM))
        else:
            self.show_columns()
