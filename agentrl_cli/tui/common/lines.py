"""Lines in a scrolling view that draws only its visible part: a page of 500 lines costs as much as one of 30.

A Static renders all of its text when any of it changes: with a curve per metric that was a second on a busy machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from agentrl_cli.tui.common.text import join


class Lines(ScrollView, can_focus=True, inherit_bindings=False):
    """Lines that never wrap; posts `Chosen` when one is clicked."""

    DEFAULT_CSS = "Lines { scrollbar-size-vertical: 1; overflow-x: hidden; }"
    lines: Sequence[Text] = ()
    marked = -1
    """The line that a search found."""

    @dataclass
    class Chosen(Message):
        """A click on a line, counted from 0."""

        line: int

    def count(self) -> int:
        """Return how many lines there are."""
        return len(self.lines)

    def mark(self, line: int) -> None:
        """Marks a line and brings it into sight."""
        self.marked = line
        self.scroll_to(y=max(line - self.size.height // 3, 0), animate=False)
        self.refresh()

    def keep_in_sight(self, line: int, *, middle: bool = False) -> None:
        """Scrolls no further than needed to show a line, or so that it is in the middle."""
        top, height = round(self.scroll_offset.y), max(self.size.height, 1)
        if not top <= line < top + height:
            near = line if line < top else line - height + 1
            y = max(line - height // 2, 0) if middle else near
            self.scroll_to(y=y, animate=False, force=True, immediate=True)

    def show(self, lines: Sequence[Text]) -> None:
        """Replaces the lines; the place stays, and the mark as long as its line does."""
        before, after = (part[self.marked : self.marked + 1] for part in (self.lines, lines))
        if [line.plain for line in before] != [line.plain for line in after]:
            self.marked = -1
        self.lines = lines
        self.measure()
        self.refresh()

    def measure(self) -> None:
        """Take the number of lines as the height of the scrolled area."""
        self.virtual_size = Size(self.size.width, self.count())

    @property
    def at_end(self) -> bool:
        """Whether the last line is in sight."""
        return self.scroll_offset.y >= self.max_scroll_y - 1

    on_resize = measure

    def render_line(self, y: int) -> Strip:
        index = y + round(self.scroll_offset.y)
        blank = Strip.blank(self.size.width, self.rich_style)
        return self.strip(index, self.size.width) if index < self.count() else blank

    def strip(self, index: int, width: int) -> Strip:
        """Return a line as it is painted."""
        line, console, style = self.lines[index], self.app.console, self.rich_style
        segments = [part for part in line.render(console) if part.text != "\n"]
        marked = index == self.marked
        style = style + Style(reverse=True) if marked else style
        # `render` leaves the line's own style out of a text without spans
        own = style + console.get_style(line.style, default="")
        strip = Strip(Segment.apply_style(segments, own))
        return strip.adjust_cell_length(width, own if marked else style)

    def line_at(self, event: events.Click) -> int | None:
        """Return the line under a click."""
        offset = event.get_content_offset(self)
        line = (offset.y if offset is not None else -1) + round(self.scroll_offset.y)
        return line if offset is not None and line < self.count() else None

    def on_click(self, event: events.Click) -> None:
        line = self.line_at(event)
        if line is not None:
            self.post_message(self.Chosen(line))


class Rows(Static):
    """A short text of which single rows can be clicked; posts `Chosen`.

    It is laid out again only if the number of lines or the width changed: a layout costs more than the text.
    """

    lines: Sequence[Text] = ()
    _count = -1

    @dataclass
    class Chosen(Message):
        """A click at (row, column) of the text, counted from 0; `meta`: what `apply_meta` gave that row."""

        rows: Rows
        row: int
        column: int
        meta: Mapping[str, Any]

    def show(self, lines: Sequence[Text]) -> None:
        """Replaces the lines."""
        self.update(join(lines), layout=len(lines) != self._count)
        self.lines, self._count = lines, len(lines)

    def on_resize(self) -> None:
        self._count = -1

    @property
    def inner(self) -> int:
        """The width of a line in cells: that of the pane around it, without its edge."""
        pane = cast(Widget, self.parent)
        return max(pane.size.width - (2 if pane.parent is self.screen else 1), 20)

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and offset.y < len(self.lines):
            meta = self.lines[offset.y].get_style_at_offset(self.app.console, 0).meta
            self.post_message(self.Chosen(self, offset.y, offset.x, meta))
