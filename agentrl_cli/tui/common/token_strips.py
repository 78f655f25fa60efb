"""The lines of the transcript as strips: a token's colours by its class, glyphs under it, headers, notes. No widget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from agentrl_cli.tui.common.episode_view import EpisodeView
from agentrl_cli.tui.common.layers import LAYERS, Classes, shade
from agentrl_cli.tui.common.layout import Kind, Layout, head_text

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
