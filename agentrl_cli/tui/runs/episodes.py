"""The list of all stored episodes; enter opens replay. The list itself: episode_table.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from agentrl_cli.tui.common.dialogs import Help, Prompt, leave, named
from agentrl_cli.tui.common.episode_table import Browse, EpisodeTable, ListingScreen, filter_prompt, head_text
from agentrl_cli.tui.common.related import quoted

if TYPE_CHECKING:
    from agentrl_cli.tui.common.reader import Reader

HELP = """\
enter  open the episode          j k  down, up
g G    first, last               space / pgup  a page down, up
f      filter: reward:<0.5 step:100..120 task:calc/* tool:calculator flag:LOOP
       text:"4,5" outcome:failed turns:>8 run:x tag:x -tag:seen
o      next sort                 /    look for text in the transcripts
r      read again                q    back
"""


class EpisodesScreen(ListingScreen):
    """Every stored episode; enter opens replay."""

    BINDINGS: ClassVar[list[BindingType]] = named(
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
            Binding("question_mark", "help", "keys"),
            Binding("q,escape", "back", "back"),
        ],
    )

    def __init__(self, reader: Reader, browse: Browse | None = None) -> None:
        super().__init__()
        self.reader = reader
        self.browse = browse or Browse()
        self.error = ""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="columns")
        yield EpisodeTable(id="table")
        yield Static("enter open  j/k move  f filter  / find  o sort  r read again  ? keys  q back", id="keys")

    def on_mount(self) -> None:
        self.table.focus()
        self._title("reading …")
        self.reload()

    def on_resize(self) -> None:
        self.query_one("#columns", Static).update(head_text(self.size.width))

    def _title(self, count: str) -> None:
        self.query_one("#head", Static).update(
            f"[b]agentrl episodes[/b]   {count}   {_escape(self.browse.describe())}"
            + (f"   [#ffb454]{_escape(self.error)}[/]" if self.error else "")
        )

    def listed(self, count: int, error: str) -> None:
        self.error = error
        empty = "no episodes match" if self.browse.filter else "no episodes yet: `agentrl rollout -n 8` makes some"
        self._title("" if error else f"{count:,} episodes" if count else empty)

    def action_move(self, step: int) -> None:
        self.table.move_to(self.table.cursor + step)

    def action_page(self, sign: int) -> None:
        self.table.move_to(self.table.cursor + sign * max(self.table.size.height - 1, 1))

    def action_end(self, last: int) -> None:
        self.table.move_to(len(self.table.ids) - 1 if last else 0)

    def action_open(self) -> None:
        self.table.open_current()

    def action_reload(self) -> None:
        self.reload()

    def action_sort(self) -> None:
        self.next_sort()

    def action_filter(self) -> None:
        def done(text: str | None) -> None:
            if text is not None:
                self.browse.filter = text
                self.reload()

        self.app.push_screen(filter_prompt(self.browse.filter), done)

    def action_find(self) -> None:
        def done(text: str | None) -> None:
            if text:
                self.browse.filter = f"{self.browse.filter} text:{quoted(text)}".strip()
                self.reload()

        self.app.push_screen(Prompt("text in the transcripts", ""), done)

    def action_help(self) -> None:
        self.app.push_screen(Help("episodes", HELP))

    def action_back(self) -> None:
        leave(self.app)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
