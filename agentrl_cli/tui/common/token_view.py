"""The transcript: tokens as line-API strips, so 32,000 of them open and page without a widget per line.

Keeps the cursor (a token), the layer and the folds. Not here: the meaning of the numbers (layers.py), line breaks
(layout.py), reading the store (reader.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import numpy as np
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from agentrl_cli.tui.common.episode_view import EpisodeView, next_flagged, off_branch, own_token
from agentrl_cli.tui.common.layers import LAYERS, Classes, shade
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


class TokenView(ScrollView, can_focus=True, inherit_bindings=False):
    """Shows one episode; calls `moved` whenever the token cursor lands somewhere."""

    DEFAULT_CSS = "TokenView { scrollbar-size-vertical: 1; overflow-x: hidden; }"

    lens: reactive[str] = reactive("push", init=False)
    """Name of the layer shown (`layer` means something else to Textual)."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.view: EpisodeView | None = None
        self.layout_: Layout | None = None
        self.cursor = 0
        self.branch: int | None = None
        """The branch that is shown alone; None: all."""
        self.hidden: frozenset[int] = frozenset()
        """The blocks outside that branch."""
        self.folded: frozenset[int] = frozenset()
        self.hits: frozenset[int] = frozenset()
        self.compact = False
        """Glyph rows only under the cursor's line (small terminals)."""
        self.moved: Callable[[int], object] | None = None
        self.levels: Classes = np.zeros(0, np.int8)
        """[n] the class of every token in the layer shown."""
        self._wanted_cell = 0
        self._line = 0

    # -- content --------------------------------------------------------------------------------------------------

    def show(self, view: EpisodeView, cursor: int = 0, *, keep_scroll: bool = False) -> None:
        """Replaces the episode; the cursor goes to `cursor`, which is scrolled into sight."""
        self.view = view
        self.cursor = max(0, min(cursor, len(view.tokens) - 1))
        self.hits = self.folded = self.hidden = frozenset()
        self.branch = None
        self._relayout()
        self._report()
        if not keep_scroll and self.layout_ is not None and view.blocks:
            # the turn from its start, with what led to it
            head = self.layout_.head_line[view.block_of(self.cursor)]
            if self._line - head < self.size.height - 6:
                self.scroll_to(y=max(head - 4, 0), animate=False, force=True, immediate=True)

    def _relayout(self) -> None:
        if self.view is None:
            return
        layer, before, hidden = LAYERS[self.lens], self.layout_, self.size.width < 4
        self.levels = self.view.classes(layer)
        if hidden and before is None:
            return
        self.layout_ = layout = Layout(
            self.view,
            before.width if hidden and before is not None else self._text_width,
            glyphs="none" if self._glyph_row else layer.glyphs,
            folded=self.folded,
            before=before,
        )
        self._line = layout.line_of(self.cursor)
        self.virtual_size = Size(layout.width, len(layout.lines) + self._glyph_row)
        self.refresh()

    @property
    def _text_width(self) -> int:
        return self.scrollable_content_region.width or self.size.width

    @property
    def _glyph_row(self) -> bool:
        """Whether the glyphs of the cursor's line are a row of their own."""
        return self.compact and self.lens != "plain"

    def watch_lens(self) -> None:
        self._relayout()
        self._report()

    def on_resize(self, event: events.Resize) -> None:
        if self.layout_ is None or self.layout_.width != self._text_width:
            self.watch_lens()

    def recolor(self) -> None:
        """Draws again after another palette was chosen."""
        level_style.cache_clear()
        glyph_style.cache_clear()
        self.refresh()

    def fold(self) -> None:
        """Folds or unfolds the cursor's turn."""
        if self.view is not None and self.view.blocks:
            self.folded ^= {self.view.blocks[self.view.block_of(self.cursor)].number}
            self.watch_lens()

    def next_branch(self) -> None:
        """Folds the turns outside the next branch, after the last branch none."""
        if self.view is None or self.view.episode.linear:
            self.notify("This episode has one branch.", timeout=2)
            return
        number = 0 if self.branch is None else self.branch + 1
        self.branch = number if number < len(self.view.episode.branches) else None
        self.folded = self.hidden = off_branch(self.view, self.branch)
        self._relayout()
        self.move_to(self.cursor if self.branch is None else own_token(self.view, number))

    # -- painting -------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """Return one row of the screen; only visible rows are ever built."""
        row, width, base = y + round(self.scroll_offset.y), self.size.width, self.rich_style
        line, own = row, False
        if self._glyph_row and row > self._line:
            line, own = row - 1, row == self._line + 1
        if self.view is None or self.layout_ is None or line >= len(self.layout_.lines):
            return Strip.blank(width, base)
        strip = Strip(list(self._segments(self.view, self.layout_, line, glyphs=own)))
        # on the widget's background: NO_COLOR's filter stops at a segment without a style
        return strip.apply_style(base).simplify().extend_cell_length(width, base).crop(0, width)

    def _segments(
        self, view: EpisodeView, layout: Layout, line: int, *, glyphs: bool
    ) -> Iterator[Segment]:
        """Yield the parts of a line of the layout, or of the glyphs under it."""
        kind, a, b = layout.lines[line]
        if kind == Kind.NOTE and a in layout.pictures:
            yield from (Segment("    "), *layout.pictures[a])
        elif kind == Kind.NOTE:
            style_name, text = layout.notes[a]
            yield Segment(text, NOTE_STYLES.get(style_name, BASE))
        elif kind == Kind.HEAD:
            block = view.blocks[a]
            text = ("▸ " if block.number in self.folded else "▾ ") + head_text(block, view)
            yield Segment(text.ljust(self.size.width), ROLE_STYLES.get(block.role, HEAD))
        else:
            yield from self._pieces(view, layout, range(a, b), glyphs or kind == Kind.GLYPH)

    def _pieces(
        self, view: EpisodeView, layout: Layout, pieces: Iterable[int], glyphs: bool
    ) -> Iterator[Segment]:
        """Yield the pieces of tokens on a line, or their glyphs; the token under the cursor and hits are marked."""
        levels, origin = LAYERS[self.lens].levels, view.tokens.origin
        for piece in pieces:
            token = layout.piece_token[piece]
            level, text = int(self.levels[token]), layout.piece_text[piece]
            if glyphs:
                style, text = (
                    glyph_style(self.lens, level),
                    levels[level].glyph * layout.piece_cells[piece],
                )
            else:
                style = level_style(self.lens, level, int(origin[token]) < 4)
                style = style + HIT if token in self.hits else style
            yield Segment(text, CURSOR if token == self.cursor else style)

    # -- moving ---------------------------------------------------------------------------------------------------

    def move_to(self, token: int) -> None:
        """Puts the cursor on a token, clamped to the episode."""
        if self.view is None or not len(self.view.tokens):
            return
        self._place(token)
        if self.layout_ is not None:
            self._wanted_cell = self.layout_.cell_of(self.cursor)

    def action_token(self, step: int) -> None:
        self.move_to(self.cursor + step)

    def move_to_end(self, last: int) -> None:
        """Puts the cursor on the last token (1), or on the first (0)."""
        self.move_to(len(self.view.tokens) - 1 if last and self.view is not None else 0)

    def action_turn(self, step: int) -> None:
        """Moves to the first token of the turn `step` further; back goes to the start of this one first."""
        if self.view is None or not self.view.blocks:
            return
        here = self.view.block_of(self.cursor)
        index = max(0, min(here + step, len(self.view.blocks) - 1))
        self.move_to(self.view.blocks[index].start)
        if self.layout_ is not None:
            self.scroll_to(y=self.layout_.head_line[index], animate=False, immediate=True)

    def action_line(self, step: int) -> None:
        """Moves up or down by `step` rows, to the token at the wanted column."""
        if self.layout_ is None:
            return
        sign = 1 if step > 0 else -1
        ways = (self.layout_.text_line_near(self._line + step - sign, way) for way in (sign, -sign))
        target = next((line for line in ways if line is not None), -1)
        token = self.layout_.token_at(target, self._wanted_cell)
        if token is not None:
            self._place(token + sign if token == self.cursor else token)

    def _place(self, token: int) -> None:
        before, most = self._line, len(self.view.tokens) - 1 if self.view is not None else 0
        self.cursor = max(0, min(token, most))
        if self.layout_ is not None:
            self._report(before)
            self.refresh()

    def _report(self, before: int | None = None) -> None:
        """Scrolls to the cursor and reports it; if it moved far, as by a page, the transcript is painted first."""
        if self.layout_ is None:
            return
        self._line = self.layout_.line_of(self.cursor)
        place = Region(0, max(self._line - 1, 0), 1, 4)
        self.scroll_to_region(place, animate=False, force=True, immediate=True)
        if self.moved is not None and before is not None and abs(self._line - before) > 2:
            self.call_after_refresh(self.moved, self.cursor)
        elif self.moved is not None:
            self.moved(self.cursor)

    def on_click(self, event: events.Click) -> None:
        line = event.y + round(self.scroll_offset.y)
        line -= self._glyph_row and line > self._line
        token = self.layout_.token_at(line, event.x) if self.layout_ is not None else None
        if token is not None:
            self.move_to(token)

    def move_to_flagged(self) -> None:
        """Moves to the next token that stands out."""
        token = next_flagged(self.view, self.cursor) if self.view is not None else None
        if token is None:
            self.notify("No token stands out.", timeout=2)
        else:
            self.move_to(token)

    # -- finding --------------------------------------------------------------------------------------------------

    def find(self, needle: str) -> int:
        """Moves to the next match of `needle` (case ignored). Returns how many matches there are."""
        found = matches(self.view.texts, needle) if self.view is not None and needle else []
        self.hits = frozenset(found)
        self.refresh()
        if found:
            self.move_to(next((token for token in found if token > self.cursor), found[0]))
        return len(found)
