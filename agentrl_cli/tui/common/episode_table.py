"""A table of episodes: 100,000 virtual rows drawn by the line API.

Only the rows that are on screen are read and drawn (measured: a DataTable takes 80 s for 100,000 rows).
"""

from __future__ import annotations

import time
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from agentrl_cli.tui.common.text import flag_names, num
from agentrl_cli.tui.common.token_text import keep_end

PAGE = 200
"""Rows read at once around the visible ones."""

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


class EpisodeTable(ScrollView, can_focus=True, inherit_bindings=False):
    """Virtual rows; posts `Wanted` for rows that are not read yet, and `Opened` for enter or a double click."""

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
        """Replaces the list; `rows` holds the rows read so far, by row id."""
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
        first, last = (
            max(top - PAGE // 2, 0),
            min(top + self.size.height + PAGE // 2, len(self.ids)),
        )
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
        text += (
            f" {time.strftime('%d %H:%M:%S', time.localtime(row.started))}"
            if row.started
            else " " * 12
        )
    marks = [flag_names(row.flags), *(f"#{tag}" for tag in row.tags), "note" * bool(row.note)]
    marks += [row.kind] if row.kind not in ("", "train") else []
    marks += [f"of {row.parent_id}"] if row.parent_id else []
    return f"{text} {' '.join(filter(None, marks))}"[:width].ljust(width)


def head_text(width: int) -> str:
    """Return the column titles of `row_text`."""
    text = f" {'id':<14} {'step':>5} {'task':<18} {'#':>3} {'reward':>6} {'outcome':<9}"
    if width >= 76:
        text += f" {'trn':>3} {'tokens':>6}"
    if width >= 92:
        text += f" {'adv':>6} {'cal':>3} {'err':>3}"
    if width >= 112:
        text += f" {'started':<11}"
    return f"{text} flags, #tags, kind"[:width].ljust(width)
