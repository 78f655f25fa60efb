"""The list of all stored episodes; enter opens replay."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.dialogs import Prompt
from agentrl_cli.tui.common.episode_list import Browse, EpisodeList
from agentrl_cli.tui.common.episode_table import EpisodeTable
from agentrl_cli.tui.common.keys import CLOSING, with_ids
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import BAD, quote

HELP = """\
enter  open the episode          j k  down, up
g G    first, last               space / pgup  a page down, up
f      filter: reward:<0.5 step:100..120 task:calc/* tool:calculator flag:LOOP
       text:"4,5" outcome:failed turns:>8 run:x tag:x -tag:seen
o      next sort                 /    look for text in the transcripts
r      read again                q    back
"""


class EpisodesScreen(AgentScreen):
    """Every stored episode; enter opens replay."""

    BINDINGS: ClassVar[list[BindingType]] = with_ids(
        "episodes",
        [
            Binding("j,down", "move(1)", "down", show=False),
            Binding("k,up", "move(-1)", "up", show=False),
            Binding("pagedown,space", "page(1)", "page", show=False),
            Binding("pageup", "page(-1)", "page", show=False),
            Binding("g,home", "end(0)", "first", show=False),
            Binding("G,end", "end(1)", "last", show=False),
            Binding("enter", "open", "open"),
            Binding("f", "filter", "filter"),
            Binding("slash", "find", "find"),
            Binding("o", "sort", "sort"),
            Binding("r", "reload", "read again"),
            *CLOSING,
        ],
    )

    HELP_TITLE, HELP_TEXT = "episodes", HELP

    def __init__(self, reader: Reader, browse: Browse | None = None) -> None:
        super().__init__(reader)
        self.browse = browse or Browse()

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield EpisodeList(self.reader, self.browse)
        yield Static(
            "enter open  j/k move  f filter  / find  o sort  r read again  ? keys  q back",
            id="keys",
        )

    def on_mount(self) -> None:
        self.table.focus()
        self._title("reading …")
        self.action_reload()

    @property
    def listing(self) -> EpisodeList:
        return self.query_one(EpisodeList)

    @property
    def table(self) -> EpisodeTable:
        return self.listing.table

    def _title(self, count: str, error: str = "") -> None:
        head = Text().append("agentrl episodes", "bold")
        head.append(f"   {count}   {self.browse.describe()}")
        self.put("head", head.append(f"   {error}" if error else "", BAD))

    def on_episode_list_listed(self, event: EpisodeList.Listed) -> None:
        some = "no episodes yet: `agentrl rollout -n 8` makes some"
        empty = "no episodes match" if self.browse.filter else some
        count = f"{event.count:,} episodes" if event.count else empty
        self._title("" if event.error else count, event.error)

    def on_episode_table_opened(self, event: EpisodeTable.Opened) -> None:
        self.open_screen("replay", event.row.id, self.browse)

    def action_move(self, step: int) -> None:
        self.table.move_to(self.table.cursor + step)

    def action_page(self, sign: int) -> None:
        self.table.move_to(self.table.cursor + sign * max(self.table.size.height - 1, 1))

    def action_end(self, last: int) -> None:
        self.table.move_to(len(self.table.ids) - 1 if last else 0)

    def action_open(self) -> None:
        self.table.open_current()

    def action_reload(self) -> None:
        self.listing.read_again()

    def action_sort(self) -> None:
        self.listing.next_sort()

    def action_filter(self) -> None:
        self.listing.ask_filter()

    def action_find(self) -> None:
        def done(text: str) -> None:
            if text:
                self.browse.filter = f"{self.browse.filter} text:{quote(text)}".strip()
                self.action_reload()

        self.ask(Prompt("text in the transcripts"), done)
