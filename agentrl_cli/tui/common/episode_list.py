"""A list of episodes as a widget, read by a filter and an order in the reader's thread, and its table.

Only the rows that are on screen are read and drawn (measured: a DataTable takes 80 s for 100,000 rows).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.strip import Strip
from textual.widgets import Static

from agentrl_cli.errors import AgentRLError
from agentrl_cli.store import Store
from agentrl_cli.store.filters import compile_filter, fields
from agentrl_cli.tui.common.agent_screen import AgentScreen, report_failure
from agentrl_cli.tui.common.dialogs import Field, Form
from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.text import keep_end, num, pad, quote
from agentrl_cli.types import Outcome

PAGE = 200
"""Rows read at once around the visible ones."""
FAINT = Style(color="#8a8a8a")
CURSOR = Style(color="#000000", bgcolor="#ffd75f", bold=True)
OUTCOMES = {
    "solved": Style(color="#7ac0ff"),
    "failed": Style(color="#d8d8d8"),
    "": Style(color="#ffd75f"),
}
TROUBLE = Style(color="#ffb454")


class EpisodeTable(Lines):
    """Virtual rows, read when they come into sight; enter or a double click opens one in replay."""

    def __init__(self, reader: Reader, browse: Browse) -> None:
        super().__init__(id="table")
        self.reader, self.browse = reader, browse
        self.ids: list[int] = []
        self.rows: dict[int, Any] = {}
        self.cursor = 0
        self._asked = (0, 0)

    def count(self) -> int:
        return len(self.ids)

    def show_rows(self, ids: list[int], rows: dict[int, Any], cursor: int = 0) -> None:
        """Replaces the list; `rows` holds the rows read so far, by row id. The cursor keeps its line of the screen."""
        top, self.ids, self.rows, self._asked = round(self.scroll_offset.y), ids, rows, (0, 0)
        self.measure()
        if top:
            y = top + cursor - self.cursor
            self.scroll_to(y=y, animate=False, force=True, immediate=True)
        self.move_to(cursor)

    def strip(self, index: int, width: int) -> Strip:
        row = self.rows.get(self.ids[index])
        if row is None:
            top = round(self.scroll_offset.y)
            last = min(top + self.size.height + PAGE // 2, len(self.ids))
            wanted = max(top - PAGE // 2, 0), last
            if self._asked != wanted:
                self._asked = wanted
                self.read_rows(*wanted)
            return Strip([Segment("  …".ljust(width), FAINT)])
        style = OUTCOMES.get(str(row.outcome or ""), TROUBLE)
        return Strip([Segment(row_text(row, width), CURSOR if index == self.cursor else style)])

    def move_to(self, index: int) -> None:
        """Puts the cursor on a row, clamped, and scrolls it into sight."""
        self.cursor = max(0, min(index, len(self.ids) - 1))
        self.keep_in_sight(self.cursor)
        self.refresh()

    def move_by(self, rows: int) -> None:
        self.move_to(self.cursor + rows)

    def move_pages(self, sign: int) -> None:
        self.move_by(sign * max(self.size.height - 1, 1))

    def move_to_end(self, last: int) -> None:
        """Puts the cursor on the last row (1), or on the first (0)."""
        self.move_to(len(self.ids) - 1 if last else 0)

    def open_current(self) -> None:
        row = self.rows.get(self.ids[self.cursor]) if self.ids else None
        if row is not None:
            cast(AgentScreen, self.screen).open_screen("replay", row.id, self.browse)

    on_worker_state_changed = report_failure

    @work(exclusive=True, group="rows", exit_on_error=False)
    async def read_rows(self, first: int, last: int) -> None:
        """Reads the rows [first, last)."""
        self.rows |= await self.reader.call(_rows, self.ids[first:last])
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        event.prevent_default()
        line = self.line_at(event)
        if line is not None and line == self.cursor:
            self.open_current()
        elif line is not None:
            self.move_to(line)


COLUMNS = (
    (0, f" {'id':<14} {'step':>5} {'task':<18} {'#':>3} {'reward':>6} {'outcome':<9}"),
    (76, f" {'trn':>3} {'tokens':>6}"),
    (92, f" {'adv':>6} {'cal':>3} {'err':>3}"),
    (112, f" {'started':<11}"),
)
"""From which width on the columns are shown: narrow terminals lose those that matter least."""


def row_text(row: Any, width: int) -> str:
    """Return one episode as one line of exactly `width` cells."""
    step, outcome = "-" if row.step is None else str(row.step), str(row.outcome or "running")
    task, at = pad(keep_end(row.task_id, 18), 18), time.localtime(row.started)
    parts = (
        f" {row.id:<14} {step:>5} {task} {row.sample:>3} {num(row.reward, '6.2f'):>6} {outcome:<9.9}",
        f" {row.n_turns:>3} {row.n_tokens:>6}",
        f" {num(row.advantage, '+.2f'):>6} {row.n_calls:>3} {row.n_tool_errors:>3}",
        f" {time.strftime('%d %H:%M:%S', at)}" if row.started else " " * 12,
    )
    text = "".join(part for part, (least, _) in zip(parts, COLUMNS, strict=True) if width >= least)
    marks = [*row.flags, *(f"#{tag}" for tag in row.tags), "note" * bool(row.note)]
    marks += [row.kind if row.kind != "train" else "", f"of {row.parent_id}" * bool(row.parent_id)]
    return set_cell_size(f"{text} {' '.join(filter(None, marks))}", width)


def head_text(width: int) -> str:
    """Return the column titles of `row_text`."""
    text = "".join(title for least, title in COLUMNS if width >= least)
    return f"{text} flags, #tags, kind"[:width].ljust(width)


SORTS = ("-time", "time", "-reward", "reward", "-step", "-advantage", "-tokens", "-turns")
EXAMPLES = """\
reward:<0.5  step:100..120  task:calc/*  flag:LOOP  tool:calculator
text:"4,5"  outcome:failed,timeout  tag:mark  -tag:seen  parent:none"""


class Browse:
    """A filter, an order and the ids they select: shared by the list and by n/N of the replay screen."""

    def __init__(self, filter: str = "", sort: str = "-time", run: str | None = None) -> None:
        self.filter = filter
        self.sort = sort
        self.run = run
        self.ids: list[int] | None = None
        self.named = ""
        """The run's name, after the list was read."""

    def load(self, store: Store) -> list[int]:
        """Return the ordered row ids (in the reader's thread). Raises UsageError for an invalid filter."""
        self.ids = list(store.episodes.ids(self.filter, self.sort, run=self.run))
        self.named = store.runs.get(self.run).name if self.run else ""
        return self.ids

    def first(self, store: Store) -> str | None:
        """Return the id of the first episode (in the reader's thread), None if the list is empty. Raises UsageError."""
        ids = self.load(store)
        return store.episodes.rows(ids[:1])[0].id if ids else None

    def neighbour(self, store: Store, episode_id: str, step: int) -> str | None:
        """Return the id of the next (1) or previous (−1) episode (in the reader's thread), None at the list's ends."""
        ids = self.ids if self.ids is not None else self.load(store)
        here = store.episodes.row(episode_id).rowid
        at = ids.index(here) + step if here in ids else 0
        ahead = ids[at:] if step > 0 else ids[at::-1] if at >= 0 else []
        rows = store.episodes.rows(ahead[:PAGE])  # some may have been deleted since
        return rows[0].id if rows else None

    def next_sort(self) -> None:
        """Takes the next order of SORTS; the caller reads the list again."""
        at = SORTS.index(self.sort) if self.sort in SORTS else -1
        self.sort, self.ids = SORTS[(at + 1) % len(SORTS)], None

    def describe(self) -> str:
        text = f"filter {self.filter or '(none)'}   sort {self.sort}"
        return f"{text}   run {self.named or self.run}" if self.run else text


def filter_form(value: str) -> Form:
    """Asks for a filter: the line itself, and fields whose conditions are added to it. An invalid one is refused."""
    flags = "TOOLFAIL BADARG NOTOOL LOOP TRUNC AFTERERR MALFORMED DRIFT DIVERGED MASK *".split()
    asked = [
        Field(
            "filter", value, "reward:<0.5 step:100.. task:calc/*", [f"{name}:" for name in fields()]
        ),
        Field("task", hint="calc/*"),
        Field("step", hint="120 or 100..120 or >100"),
        Field("reward", hint="<0.5"),
        Field("outcome", choices=[outcome.value for outcome in Outcome]),
        Field("flag", choices=flags),
        Field("kind", choices=("train", "eval", "rollout", "chat", "whatif")),
        Field("tool", hint="calculator"),
        Field("text", hint="words in the transcript"),
    ]
    return Form(
        "filter",
        asked,
        filter_text,
        help=f"{EXAMPLES}\nfields: {' '.join(fields())}",
        check=compile_filter,
    )


def filter_text(values: Mapping[str, str]) -> str:
    """Return the line, and a condition for every other field with a value."""
    asked = [(name, value) for name, value in values.items() if value and name != "filter"]
    rest = [
        f"{name}:{quote(value) if ' ' in value and name != 'step' else value}"
        for name, value in asked
    ]
    return " ".join([values["filter"], *rest]).strip()


class EpisodeList(Vertical):
    """Column titles over an `EpisodeTable`; `read_again` fills it by its `browse` and posts `Listed`."""

    @dataclass
    class Listed(Message):
        """The list was read: how many episodes, or the error in the filter."""

        count: int
        error: str

    def __init__(self, reader: Reader, browse: Browse, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.reader, self.browse, self.table = reader, browse, EpisodeTable(reader, browse)

    def compose(self) -> ComposeResult:
        yield Static(id="columns")
        yield self.table

    on_worker_state_changed = report_failure

    def show_columns(self) -> None:
        self.query_one("#columns", Static).update(head_text(self.size.width))

    on_resize = show_columns

    @work(exclusive=True, group="ids", exit_on_error=False)
    async def read_again(self) -> None:
        """Reads ids and a page in one go, so that the first paint shows rows; the cursor stays on its episode.

        In another order it does so unless it is at the top.
        """
        table, again = self.table, self.browse.ids is not None

        def place() -> int:
            here = table.ids[table.cursor] if table.ids and (again or table.cursor) else -1
            return ids.index(here) if here in ids else 0

        try:
            ids = await self.reader.call(self.browse.load)
            page, at = max(self.size.height, 40), place()
            rows = await self.reader.call(_rows, ids[max(at - page, 0) : at + page])
        except AgentRLError as error:
            self.post_message(self.Listed(0, f"{error.message} {error.hint}".strip()))
            return
        table.show_rows(ids, rows, place())  # it may have moved meanwhile
        self.post_message(self.Listed(len(ids), ""))

    def ask_filter(self) -> bool:
        """Asks for a filter and reads the list by it."""

        def read(text: str | None) -> None:
            self.browse.filter = self.browse.filter if text is None else text
            self.read_again()

        self.app.push_screen(filter_form(self.browse.filter), read)
        return True

    def next_sort(self) -> None:
        """Reads the list in the next order."""
        self.browse.next_sort()
        self.read_again()


def _rows(store: Store, ids: list[int]) -> dict[int, Any]:
    return {row.rowid: row for row in store.episodes.rows(ids)}
