"""The transcript: tokens as line-API strips, so 32,000 of them open and page without a widget per line.

Keeps the cursor (a token), the layer and the folds. Not here: the meaning of the numbers (layers.py), line breaks
(layout.py), reading the store (load_episode.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from agentrl_cli.tui.common.episode_view import EpisodeView
from agentrl_cli.tui.common.layers import LAYERS, Classes, Layer, shade
from agentrl_cli.tui.common.layout import Kind, Layout, head_text
from agentrl_cli.tui.common.token_text import matches

NOTE_STYLES = {
    "call": Style(color="#8fbfff", bold=True),
    "argument": Style(color="#a8b8c8"),
    "code": Style(color="#c8d8b8"),
    "result": Style(color="#9ab89a"),
    "image": Style(color="#9ab89a"),
    "error": Style(color="#ffb454", bold=True),
    "live": Style(color="#c8c8c8", italic=True),
}
ROLE_STYLES = {
    "assistant": Style(color="#cfe0ff", bgcolor="#1c2a44", bold=True),
    "tool": Style(color="#f0d8b8", bgcolor="#33271a", bold=True),
    "user": Style(color="#efe8c0", bgcolor="#2c2a18", bold=True),
    "system": Style(color="#d0d0e0", bgcolor="#25253a", bold=True),
}
HEAD = Style(color="#d0d0d0", bgcolor="#2a2a2a", bold=True)
BASE = Style(color="#e0e0e0")
DIM = Style(color="#8a8a8a")
CURSOR = Style(color="#000000", bgcolor="#ffd75f", bold=True)
HIT = Style(underline=True, bold=True, color="#ffd75f")


@lru_cache(maxsize=256)
def level_style(layer: str, level: int, foreign: bool) -> Style:
    """Return the style of a token of a class; tokens that were not sampled are dim."""
    levels = LAYERS[layer].levels
    color = shade(levels[level].color) if level < len(levels) else ""
    return (DIM if foreign else BASE) + Style(bgcolor=color or None)


@lru_cache(maxsize=256)
def glyph_style(layer: str, level: int) -> Style:
    levels = LAYERS[layer].levels
    color = shade(levels[level].color) if level < len(levels) else ""
    return Style(color="#ffffff", bgcolor=color, bold=True) if color else Style(color="#6a6a6a")


def forget_colors() -> None:
    """Clears the cached styles after another palette was chosen."""
    level_style.cache_clear()
    glyph_style.cache_clear()


@dataclass(slots=True)
class Painter:
    """Draws lines of a layout under a layer."""

    view: EpisodeView
    layout: Layout
    lens: str
    """The layer's name."""
    classes: Classes

    def line(
        self, line: int, width: int, cursor: int, folded: frozenset[int], hits: frozenset[int]
    ) -> Strip:
        """Return a line of the layout; the token under the cursor and the hits of a search are marked."""
        kind, a, b = self.layout.lines[line]
        if kind == Kind.TEXT:
            return self._text(a, b, cursor, hits)
        if kind == Kind.GLYPH:
            return self._glyphs(a, b, cursor)
        if kind == Kind.NOTE:
            if a in self.layout.pictures:
                return Strip([Segment("    "), *self.layout.pictures[a]])
            style_name, text = self.layout.notes[a]
            return Strip([Segment(text, NOTE_STYLES.get(style_name, BASE))])
        block = self.view.blocks[a]
        text = ("▸ " if block.number in folded else "▾ ") + head_text(block, self.view)
        return Strip([Segment(text[:width].ljust(width), ROLE_STYLES.get(block.role, HEAD))])

    def glyphs(self, line: int, cursor: int) -> Strip:
        """Return the glyphs of a text line; nothing for other lines, and for an episode without a line yet."""
        if line >= len(self.layout.lines):
            return Strip([])
        kind, a, b = self.layout.lines[line]
        return self._glyphs(a, b, cursor) if kind in (Kind.TEXT, Kind.GLYPH) else Strip([])

    def _text(self, first: int, last: int, cursor: int, hits: frozenset[int]) -> Strip:
        """Return the pieces of tokens, neighbours of one style merged into one segment."""
        layout, classes, origin = self.layout, self.classes, self.view.tokens.origin
        segments: list[Segment] = []
        run: list[str] = []
        current: Style | None = None
        for piece in range(first, last):
            token = layout.piece_token[piece]
            if token == cursor:
                style = CURSOR
            else:
                style = level_style(self.lens, int(classes[token]), int(origin[token]) < 4)
                if token in hits:
                    style = style + HIT
            if style is not current:
                if run and current is not None:
                    segments.append(Segment("".join(run), current))
                run, current = [], style
            run.append(layout.piece_text[piece])
        if run and current is not None:
            segments.append(Segment("".join(run), current))
        return Strip(segments)

    def _glyphs(self, first: int, last: int, cursor: int) -> Strip:
        layout, levels = self.layout, LAYERS[self.lens].levels
        segments: list[Segment] = []
        for piece in range(first, last):
            token = layout.piece_token[piece]
            level = int(self.classes[token])
            style = CURSOR if token == cursor else glyph_style(self.lens, level)
            segments.append(Segment(levels[level].glyph * layout.piece_cells[piece], style))
        return Strip(segments)


CACHE_LINES = 4096


class TokenView(ScrollView, can_focus=True, inherit_bindings=False):
    """Shows one episode; posts `Moved` whenever the token cursor lands somewhere."""

    DEFAULT_CSS = "TokenView { scrollbar-size-vertical: 1; overflow-x: hidden; }"

    lens: reactive[str] = reactive("push", init=False)
    """Name of the layer shown (`layer` means something else to Textual)."""

    class Moved(Message):
        """The cursor is on another token now."""

        def __init__(self, view: TokenView, token: int) -> None:
            super().__init__()
            self.view, self.token = view, token

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.view: EpisodeView | None = None
        self.layout_: Layout | None = None
        self.cursor = 0
        self.folded: frozenset[int] = frozenset()
        self.hits: frozenset[int] = frozenset()
        self.compact = False
        """Glyph rows only under the cursor's line (small terminals)."""
        self.moved: Callable[[int], None] | None = None
        """Called at once with the token, in place of the message, so that its painting is in the same frame."""
        self._levels: Classes | None = None
        self._painter: Painter | None = None
        self._made: tuple[object, ...] = ()
        """The layout's arguments without the episode."""
        self._strips: dict[int, Strip] = {}
        self._base = BASE
        """Text on the widget's background; computing it costs more than a line."""
        self._wanted_cell = 0
        self._line = 0

    # -- content --------------------------------------------------------------------------------------------------

    def show(self, view: EpisodeView, cursor: int = 0, *, keep_scroll: bool = False) -> None:
        """Replaces the episode; the cursor goes to `cursor`, which is scrolled into sight."""
        self.view = view
        self.cursor = max(0, min(cursor, len(view.tokens) - 1))
        self.folded = frozenset()
        self.hits = frozenset()
        self._relayout()
        self._cursor_moved()
        if not keep_scroll and self.layout_ is not None and view.blocks:
            head = self.layout_.head_line[
                view.block_of(self.cursor)
            ]  # the turn from its start, with what led to it
            if self._line - head < self.size.height - 6:
                self.scroll_to(y=max(head - 4, 0), animate=False, force=True, immediate=True)

    def _relayout(self) -> None:
        if self.view is None or self.size.width < 4:
            return
        layer = self._layer
        glyphs = (
            "none"
            if layer.name == "plain" or self.compact
            else ("all" if layer.everywhere else "sampled")
        )
        width = self.scrollable_content_region.width or self.size.width
        made = (width, glyphs, self.folded)
        if self.layout_ is None or self.layout_.view is not self.view or made != self._made:
            self.layout_ = Layout(
                self.view, width, glyphs=glyphs, folded=self.folded, before=self.layout_
            )
            self._made = made  # another layer mostly has its lines where the last had them
        self._levels = self.view.classes(layer)
        self._painter = Painter(self.view, self.layout_, self.lens, self._levels)
        self._strips.clear()
        self._base = self.rich_style
        self._line = self.layout_.line_of(self.cursor)
        self.virtual_size = Size(self.layout_.width, self._count())
        self.refresh()

    def _count(self) -> int:
        assert self.layout_ is not None
        return len(self.layout_.lines) + (1 if self.compact and self._layer.name != "plain" else 0)

    @property
    def levels(self) -> Classes:
        """[n] the class of every token in the layer shown."""
        return self._levels if self._levels is not None else np.zeros(0, np.int8)

    @property
    def _layer(self) -> Layer:
        return LAYERS[self.lens]

    def watch_lens(self) -> None:
        self._relayout()
        self._cursor_moved()

    def on_resize(self, event: events.Resize) -> None:
        if self.layout_ is None or self.layout_.width != (
            self.scrollable_content_region.width or self.size.width
        ):
            self._relayout()
            self._cursor_moved()

    def recolor(self) -> None:
        """Draws again after another palette was chosen."""
        forget_colors()
        self._strips.clear()
        self.refresh()

    def fold(self) -> None:
        """Folds or unfolds the cursor's turn."""
        if self.view is None or not self.view.blocks:
            return
        self.folded ^= {self.view.blocks[self.view.block_of(self.cursor)].number}
        self._relayout()
        self._cursor_moved()

    def unfold_but(self, blocks: frozenset[int]) -> None:
        """Folds these blocks and unfolds all others."""
        self.folded = blocks
        self._relayout()

    # -- painting -------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """Return one row of the screen; only visible rows are ever built."""
        line = y + round(self.scroll_offset.y)
        width = self.size.width
        painter = self._painter
        if painter is None or self.layout_ is None:
            return Strip.blank(width, self.rich_style)
        kind_line = line
        if self.compact and self._layer.name != "plain" and line > self._line:
            if line == self._line + 1:
                return self._fit(painter.glyphs(self._line, self.cursor))
            kind_line = line - 1
        if kind_line >= len(self.layout_.lines):
            return Strip.blank(width, self.rich_style)
        strip = self._strips.get(kind_line)
        if strip is None:
            strip = self._fit(painter.line(kind_line, width, self.cursor, self.folded, self.hits))
            if len(self._strips) > CACHE_LINES:
                self._strips.clear()
            self._strips[kind_line] = strip
        return strip

    def _fit(self, strip: Strip) -> Strip:
        """Make a row as wide as the widget, on its background: NO_COLOR's filter stops at a segment without a style."""
        base, width = self._base, self.size.width
        return strip.apply_style(base).extend_cell_length(width, base).crop(0, width)

    # -- moving ---------------------------------------------------------------------------------------------------

    def move_to(self, token: int) -> None:
        """Puts the cursor on a token, clamped to the episode."""
        if self.view is None or not len(self.view.tokens):
            return
        self._place(max(0, min(token, len(self.view.tokens) - 1)))
        if self.layout_ is not None:
            self._wanted_cell = self.layout_.cell_of(self.cursor)

    def move(self, step: int) -> None:
        self.move_to(self.cursor + step)

    def move_turn(self, step: int) -> None:
        """Moves to the first token of the turn `step` further; back goes to the start of this one first."""
        if self.view is None or not self.view.blocks:
            return
        here = self.view.block_of(self.cursor)
        index = max(0, min(here + step, len(self.view.blocks) - 1))
        self.move_to(self.view.blocks[index].start)
        if self.layout_ is not None and index < len(self.layout_.head_line):
            self.scroll_to(y=self.layout_.head_line[index], animate=False, immediate=True)

    def move_lines(self, step: int) -> None:
        """Moves up or down by `step` rows, to the token at the wanted column."""
        if self.layout_ is None:
            return
        line, sign = self._line, 1 if step > 0 else -1
        target = self.layout_.text_line_near(line + step - sign, sign)
        if target is None:
            target = self.layout_.text_line_near(line + step - sign, -sign)
        if target is None:
            return
        token = self.layout_.token_at(target, self._wanted_cell)
        if token is not None:
            if token == self.cursor:
                token += sign
            self._place(max(0, min(token, len(self.view.tokens) - 1 if self.view else 0)))

    def _place(self, token: int) -> None:
        old, self.cursor = self._line, token
        if self.layout_ is None:
            return
        self._line = self.layout_.line_of(token)
        for line in {old, old + 1, self._line, self._line + 1}:
            self._strips.pop(line, None)
        if self._spans_lines(token):
            self._strips.clear()
        self._cursor_moved(far=abs(self._line - old) > 2)
        self.refresh()

    def _spans_lines(self, token: int) -> bool:
        """Whether the token covers several lines, as a run of newlines does."""
        assert self.view is not None
        return token < len(self.view.texts) and self.view.texts[token].count("\n") > 0

    def _cursor_moved(self, *, far: bool = False) -> None:
        """Reports the cursor's place; if it moved `far`, as by a page, the transcript is painted first."""
        if self.layout_ is None:
            return
        self._line = self.layout_.line_of(self.cursor)
        self.scroll_to_region(
            Region(0, max(self._line - 1, 0), 1, 4), animate=False, force=True, immediate=True
        )
        if self.moved is not None and not far:
            self.moved(self.cursor)
        else:
            self.post_message(self.Moved(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        if self.layout_ is None:
            return
        line = event.y + round(self.scroll_offset.y)
        if self.compact and line > self._line:
            line -= 1
        token = self.layout_.token_at(line, event.x)
        if token is not None:
            self.move_to(token)

    # -- finding --------------------------------------------------------------------------------------------------

    def find(self, needle: str) -> int:
        """Moves to the next match of `needle` (case ignored). Returns how many matches there are."""
        found = matches(self.view.texts, needle) if self.view is not None and needle else []
        self.hits = frozenset(found)
        self._strips.clear()
        self.refresh()
        if found:
            self.move_to(next((token for token in found if token > self.cursor), found[0]))
        return len(found)
