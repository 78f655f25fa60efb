"""A table of episodes: 100,000 virtual rows drawn by the line API.

Only the rows that are on screen are read and drawn (measured: a DataTable takes 80 s for 100,000 rows).
"""

from __future__ import annotations

import time
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip

from agentrl_cli.tui.common.lines import Lines
from agentrl_cli.tui.common.text import flag_names, num
from agentrl_cli.tui.common.token_text import keep_end

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

    def count(self) -> int:
        return len(self.ids)

    def show_rows(self, ids: list[int], rows: dict[int, Any], cursor: int = 0) -> None:
        """Replaces the list; `rows` holds the rows read so far, by row id."""
        self.ids, self.rows, self._asked = ids, rows, (0, 0)
        self.measure()
        self.move_to(cursor)

    def add_rows(self, rows: dict[int, Any]) -> None:
        self.rows.update(rows)
        self.refresh()

    def strip(self, index: int, width: int) -> Strip:
        row = self.rows.get(self.ids[index])
        if row is None:
            self._want()
            return Strip([Segment("  …".ljust(width), FAINT)])
        style = OUTCOMES.get(str(row.outcome or ""), TROUBLE)
        return Strip([Segment(row_text(row, width), CURSOR if index == self.cursor else style)])

    def _want(self) -> None:
        top = round(self.scroll_offset.y)
        last = min(top + self.size.height + PAGE // 2, len(self.ids))
        wanted = max(top - PAGE // 2, 0), last
        if self._asked != wanted:
            self._asked = wanted
            self.post_message(self.Wanted(*wanted))

    def move_to(self, index: int) -> None:
        """Puts the cursor on a row, clamped, and scrolls it into sight."""
        self.cursor = max(0, min(index, len(self.ids) - 1))
        self.keep_in_sight(self.cursor)
        self.refresh()

    def open_current(self) -> None:
        row = self.rows.get(self.ids[self.cursor]) if self.ids else None
        if row is not None:
            self.post_message(self.Opened(row))

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
    task, at = keep_end(row.task_id, 18), time.localtime(row.started)
    parts = (
        f" {row.id:<14} {step:>5} {task:<18} {row.sample:>3} {num(row.reward, '6.2f'):>6} {outcome:<9.9}",
        f" {row.n_turns:>3} {row.n_tokens:>6}",
        f" {num(row.advantage, '+.2f'):>6} {row.n_calls:>3} {row.n_tool_errors:>3}",
        f" {time.strftime('%d %H:%M:%S', at)}" if row.started else " " * 12,
    )
    text = "".join(part for part, (least, _) in zip(parts, COLUMNS, strict=True) if width >= least)
    marks = [flag_names(row.flags), *(f"#{tag}" for tag in row.tags), "note" * bool(row.note)]
    marks += [row.kind if row.kind != "train" else "", f"of {row.parent_id}" * bool(row.parent_id)]
    return f"{text} {' '.join(filter(None, marks))}"[:width].ljust(width)


def head_text(width: int) -> str:
    """Return the column titles of `row_text`."""
    text = "".join(title for least, title in COLUMNS if width >= least)
    return f"{text} flags, #tags, kind"[:width].ljust(width)
