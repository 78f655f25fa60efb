"""Lines of rich text in a scrolling view that draws only what is visible: a page of 500 lines costs what 30 cost.

A Static renders all of its text when any of it changes: with a curve per metric that was a second on a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static


class Lines(ScrollView, can_focus=True, inherit_bindings=False):
    """Lines that never wrap; posts `Chosen` when one is clicked."""

    DEFAULT_CSS = "Lines { scrollbar-size-vertical: 1; overflow-x: hidden; }"

    class Chosen(Message):
        """A click on a line, counted from 0."""

        def __init__(self, line: int) -> None:
            super().__init__()
            self.line = line

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.lines: Sequence[Text] = ()
        self.marked = -1
        """The line that a search found."""

    def mark(self, line: int) -> None:
        """Marks a line and brings it into sight."""
        self.marked = line
        self.scroll_to(y=max(line - self.size.height // 3, 0), animate=False)
        self.refresh()

    def show(self, lines: Sequence[Text]) -> None:
        """Replaces the lines; the place stays."""
        self.lines = lines
        self.virtual_size = Size(self.size.width, len(lines))
        self.refresh()

    @property
    def at_end(self) -> bool:
        """Whether the last line is in sight."""
        return self.scroll_offset.y >= self.max_scroll_y - 1

    def on_resize(self, event: events.Resize) -> None:
        self.virtual_size = Size(event.size.width, len(self.lines))

    def render_line(self, y: int) -> Strip:
        index, width = y + round(self.scroll_offset.y), self.size.width
        style = self.rich_style
        if index >= len(self.lines):
            return Strip.blank(width, style)
        line = self.lines[index]
        console = self.app.console
        segments = [part for part in line.render(console) if part.text != "\n"]
        style = style + Style(reverse=True) if index == self.marked else style
        own = style + console.get_style(
            line.style, default=""
        )  # `render` leaves it out of a text without spans
        rest = own if index == self.marked else style
        return Strip(Segment.apply_style(segments, own)).adjust_cell_length(width, rest)

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        line = (offset.y if offset is not None else -1) + round(self.scroll_offset.y)
        if offset is not None and line < len(self.lines):
            self.post_message(self.Chosen(line))


class Rows(Static):
    """A short text of which single rows can be clicked; posts `Chosen`."""

    class Chosen(Message):
        """A click at (row, column) of the text, counted from 0."""

        def __init__(self, rows: Rows, row: int, column: int) -> None:
            super().__init__()
            self.rows, self.row, self.column = rows, row, column

        @property
        def control(self) -> Rows:
            """The widget, by which `@on` selects."""
            return self.rows

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None:
            self.post_message(self.Chosen(self, offset.y, offset.x))
