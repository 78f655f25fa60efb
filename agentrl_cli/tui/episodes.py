"""The list of episodes: 100,000 virtual rows drawn by the line API.

The ordered ids come once per filter and sort, in the reader's thread; only rows that are on screen are read and drawn
(measured: a DataTable takes 80 s for 100,000 rows).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.tui.dialogs import AgentScreen, Help, Prompt, leave, named
from agentrl_cli.tui.panels import flag_names, num
from agentrl_cli.tui.text import keep_end

if TYPE_CHECKING:
    from agentrl_cli.store import Store
    from agentrl_cli.tui.reader import Reader

SORTS = ("-time", "time", "-reward", "reward", "-step", "-advantage", "-tokens", "-turns")
PAGE = 200
"""Rows read at once around what is visible."""

HEAD = Style(bold=True, color="#8fbfff")
ROW = Style(color="#d8d8d8")
FAINT = Style(color="#8a8a8a")
CURSOR = Style(color="#000000", bgcolor="#ffd75f", bold=True)
OUTCOMES = {
    "solved": Style(color="#7ac0ff"),
    "failed": Style(color="#d8d8d8"),
    "": Style(color="#ffd75f"),
}
TROUBLE = Style(color="#ffb454")


class Browse:
    """A filter, a sort and the ids they give: shared by the list and by n/N of the replay screen."""

    def __init__(self, filter: str = "", sort: str = "-time", run: str | None = None) -> None:
        self.filter = filter
        self.sort = sort
        self.run = run
        self.ids: list[int] | None = None

    def load(self, store: Store) -> list[int]:
        """The ordered row ids (in the reader's thread). Raises UsageError for a filter that cannot be read."""
        self.ids = list(store.episode_ids(self.filter, self.sort, run=self.run))
        return self.ids

    def neighbour(self, store: Store, episode_id: str, step: int) -> str | None:
        """The id of the episode `step` further in the list (in the reader's thread), None at its ends."""
        ids = self.ids if self.ids is not None else self.load(store)
        here = store.episode_row(episode_id).rowid
        at = ids.index(here) + step if here in ids else 0
        rows = store.episode_rows([ids[at]]) if 0 <= at < len(ids) else []
        return rows[0].id if rows else None

    def describe(self) -> str:
        text = f"filter {self.filter or '(none)'}   sort {self.sort}"
        return f"{text}   run {self.run}" if self.run else text


class EpisodeTable(ScrollView, can_focus=True, inherit_bindings=False):
    """Virtual rows; asks for what it lacks by `Wanted`, says `Opened` on enter."""

    DEFAULT_CSS = "EpisodeTable { scrollbar-size-vertical: 1; overflow-x: hidden; }"

    class Wanted(Message):
        """Rows [first, last) are visible and not read yet."""

        def __init__(self, first: int, last: int) -> None:
            super().__init__()
            self.first, self.last = first, last

    class Opened(Message):
        """Enter or a double click on a row."""

        def __init__(self, row: Any) -> None:
            super().__init__()
            self.row = row

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.ids: list[int] = []
        self.rows: dict[int, Any] = {}
        self.cursor = 0
        self._asked: tuple[int, int] = (0, 0)

    def show(self, ids: list[int], rows: dict[int, Any], cursor: int = 0) -> None:
        """Replaces the list; `rows` holds what was read already, by row id."""
        self.ids, self.rows = ids, rows
        self._asked = (0, 0)
        self.virtual_size = Size(self.size.width, len(ids))
        self.move_to(cursor)
        self.refresh()

    def add_rows(self, rows: dict[int, Any]) -> None:
        self.rows.update(rows)
        self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        self.virtual_size = Size(event.size.width, len(self.ids))

    def render_line(self, y: int) -> Strip:
        index, width = y + round(self.scroll_offset.y), self.size.width
        if index >= len(self.ids):
            return Strip.blank(width, self.rich_style)
        row = self.rows.get(self.ids[index])
        if row is None:
            self._want()
            return Strip([Segment("  …".ljust(width), FAINT)])
        text = row_text(row, width)
        if index == self.cursor:
            return Strip([Segment(text, CURSOR)])
        outcome = str(row.outcome or "")
        return Strip([Segment(text, OUTCOMES.get(outcome, TROUBLE))])

    def _want(self) -> None:
        top = round(self.scroll_offset.y)
        first, last = max(top - PAGE // 2, 0), min(top + self.size.height + PAGE // 2, len(self.ids))
        if self._asked != (first, last):
            self._asked = (first, last)
            self.post_message(self.Wanted(first, last))

    def move_to(self, index: int) -> None:
        """Puts the cursor on a row, clamped, and scrolls it into sight."""
        self.cursor = max(0, min(index, len(self.ids) - 1))
        top, height = round(self.scroll_offset.y), max(self.size.height, 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, force=True, immediate=True)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False, force=True, immediate=True)
        self.refresh()

    def open_current(self) -> None:
        row = self.rows.get(self.ids[self.cursor]) if self.ids else None
        if row is not None:
            self.post_message(self.Opened(row))

    def on_click(self, event: events.Click) -> None:
        index = event.y + round(self.scroll_offset.y)
        if index < len(self.ids):
            again = index == self.cursor
            self.move_to(index)
            if again:
                self.open_current()


def row_text(row: Any, width: int) -> str:
    """One episode as one line of exactly `width` cells; narrow terminals lose the columns that matter least."""
    step = "-" if row.step is None else str(row.step)
    outcome = str(row.outcome or "running")
    task = keep_end(row.task_id, 18)
    text = f" {row.id:<14} {step:>5} {task:<18} {row.sample:>3} {num(row.reward, '6.2f'):>6} {outcome:<9.9}"
    if width >= 76:
        text += f" {row.n_turns:>3} {row.n_tokens:>6}"
    if width >= 92:
        text += f" {num(row.advantage, '+.2f'):>6} {row.n_calls:>3} {row.n_tool_errors:>3}"
    if width >= 112:
        text += f" {time.strftime('%d %H:%M:%S', time.localtime(row.started))}" if row.started else " " * 12
    return f"{text} {flag_names(row.flags)}"[:width].ljust(width)


def head_text(width: int) -> str:
    """The column titles of `row_text`."""
    text = f" {'id':<14} {'step':>5} {'task':<18} {'#':>3} {'reward':>6} {'outcome':<9}"
    if width >= 76:
        text += f" {'trn':>3} {'tokens':>6}"
    if width >= 92:
        text += f" {'adv':>6} {'cal':>3} {'err':>3}"
    if width >= 112:
        text += f" {'started':<11}"
    return f"{text} flags"[:width].ljust(width)


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

    @property
    def table(self) -> EpisodeTable:
        return self.query_one("#table", EpisodeTable)

    def on_resize(self) -> None:
        self.query_one("#columns", Static).update(head_text(self.size.width))

    def _title(self, count: str) -> None:
        self.query_one("#head", Static).update(
            f"[b]agentrl episodes[/b]   {count}   {_escape(self.browse.describe())}"
            + (f"   [#ffb454]{_escape(self.error)}[/]" if self.error else "")
        )

    @work(exclusive=True, group="ids", exit_on_error=False)
    async def reload(self) -> None:
        """Reads the ids and the first page in one go, so that the first paint shows rows."""
        height = max(self.size.height, 40)
        try:
            ids, rows = await self.reader.call(_first_page, self.browse, height)
        except AgentRLError as error:
            self.error = f"{error.message} {error.hint}".strip()
            self._title("")
            return
        self.error = ""
        self.table.show(ids, rows)
        empty = "no episodes match" if self.browse.filter else "no episodes yet: `agentrl rollout -n 8` makes some"
        self._title(f"{len(ids):,} episodes" if ids else empty)

    @work(exclusive=True, group="rows", exit_on_error=False)
    async def on_episode_table_wanted(self, event: EpisodeTable.Wanted) -> None:
        rows = await self.reader.call(_rows, self.table.ids[event.first : event.last])
        self.table.add_rows(rows)

    def on_episode_table_opened(self, event: EpisodeTable.Opened) -> None:
        from agentrl_cli.tui.replay import ReplayScreen

        self.app.push_screen(ReplayScreen(self.reader, event.row.id, self.browse))

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
        at = SORTS.index(self.browse.sort) if self.browse.sort in SORTS else -1
        self.browse.sort = SORTS[(at + 1) % len(SORTS)]
        self.reload()

    def action_filter(self) -> None:
        def done(text: str | None) -> None:
            if text is not None:
                self.browse.filter = text
                self.reload()

        self.app.push_screen(Prompt("filter", self.browse.filter), done)

    def action_find(self) -> None:
        def done(text: str | None) -> None:
            if text:
                self.browse.filter = f'{self.browse.filter} text:"{text}"'.strip()
                self.reload()

        self.app.push_screen(Prompt("text in the transcripts", ""), done)

    def action_help(self) -> None:
        self.app.push_screen(Help("episodes", HELP))

    def action_back(self) -> None:
        leave(self.app)


def _first_page(store: Store, browse: Browse, height: int) -> tuple[list[int], dict[int, Any]]:
    ids = browse.load(store)
    return ids, _rows(store, ids[:height])


def _rows(store: Store, ids: list[int]) -> dict[int, Any]:
    return {row.rowid: row for row in store.episode_rows(ids)}


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
