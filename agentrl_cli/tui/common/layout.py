"""Tokens to lines of a given width: pure, fast (32,000 tokens in a few hundredths of a second), no textual.

A line is a small tuple (kind, a, b). Text lines index pieces; a piece is the part of one token that lies on one line,
so a cursor, a colour and a glyph always belong to exactly one token.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from rich.cells import cell_len, chop_cells
from rich.segment import Segment

from agentrl_cli.store.display import image_line
from agentrl_cli.tui.common.episode_view import Block, EpisodeView
from agentrl_cli.tui.common.picture import SMALL, picture_rows
from agentrl_cli.tui.common.tree import continues
from agentrl_cli.types import Message, ToolCall, Turn
from agentrl_cli.types.content import images_of

MAX_NOTE_LINES = 14


class Kind(IntEnum):
    """The kind of a line: (HEAD, block, 0), (TEXT, first piece, last piece + 1), (NOTE, index into notes, 0), and
    (GLYPH, first piece, last piece + 1) for the layer's glyphs under the text line before it.
    """

    HEAD = 0
    TEXT = 1
    GLYPH = 2
    NOTE = 3


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "·" for c in text)


@lru_cache(maxsize=65536)
def _segments(text: str) -> tuple[tuple[str, int, bool], ...]:
    """Return a token's text as (shown, cells, ends the line) parts; always at least one, so every token can be pointed
    at.
    """
    out: list[tuple[str, int, bool]] = []
    parts = text.split("\n")
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        shown = _printable(part.replace("\t", "⇥   ").replace("\r", "␍"))
        if not last:
            out.append((shown + "⏎", cell_len(shown) + 1, True))
        elif shown or not out:
            shown = shown or "∅"
            out.append((shown, len(shown) if shown.isascii() else cell_len(shown), False))
    return tuple(out)


class Layout:
    """The lines of one episode at one width.

    `lines`: the kind of each row; `piece_token`, `piece_text`, `piece_cells`: parallel lists; `notes`: (style, text).
    """

    _spans: dict[int, list[tuple[int, int]]]
    """Block → first and last piece of each of its text lines, folded or not."""

    def __init__(
        self,
        view: EpisodeView,
        width: int,
        *,
        glyphs: str = "sampled",
        folded: frozenset[int] = frozenset(),
        before: Layout | None = None,
    ) -> None:
        """`glyphs`: a glyph row under `sampled` lines (with a model token), `all` lines, or `none`.

        `before`: an earlier layout of this episode; at the same width its line breaks, most of the work, are taken.
        """
        self.view = view
        self.width = max(width, 8)
        self.glyphs = glyphs
        self.lines: list[tuple[int, int, int]] = []
        self.folded = folded
        self.piece_token: list[int] = []
        self.piece_text: list[str] = []
        self.piece_cells: list[int] = []
        if before is not None and before.view is view and before.width == self.width:
            self.piece_token, self.piece_text = before.piece_token, before.piece_text
            self.piece_cells, self._spans = before.piece_cells, before._spans
        else:
            self._spans = {block.number: self._wrap(block) for block in view.blocks}
        self.notes: list[tuple[str, str]] = []
        self.pictures: dict[int, tuple[Segment, ...]] = {}
        """Note → a line of an image."""
        self.head_line: list[int] = []
        self._text_lines: list[int] = []
        self._text_first: list[int] = []
        for block in view.blocks:
            self._block(block, block.number in folded)
        if view.live:
            self._note("live", f"… {view.live}")

    def _block(self, block: Block, folded: bool) -> None:
        self.head_line.append(len(self.lines))
        self.lines.append((Kind.HEAD, block.number, 0))
        if folded:
            return
        images = iter(block.turn.shown if block.turn is not None else ())
        for style, text in result_notes(block.turn, self.view.images) if block.turn else ():
            self._note(style, text)
            rows = (
                picture_rows(next(images), min(SMALL[0], self.width - 4), SMALL[1])
                if style == "image"
                else ()
            )
            for row in rows:
                self.pictures[len(self.notes)] = row
                self._add_note("image", "".join(part.text for part in row))
        sampled = self.glyphs == "sampled" and block.role == "assistant"
        for first, last in self._spans[block.number]:
            self._text_lines.append(len(self.lines))
            self._text_first.append(first)
            self.lines.append((Kind.TEXT, first, last))
            if self.glyphs == "all" or sampled:
                self.lines.append((Kind.GLYPH, first, last))
        for call in block.turn.calls if block.turn is not None else ():
            for style, text in call_notes(call):
                self._note(style, text)

    def _note(self, style: str, text: str) -> None:
        for line in map(_printable, text.expandtabs(4).split("\n")):
            for part in chop_cells(line, self.width - 1) or [line]:
                self._add_note(style, part)

    def _add_note(self, style: str, text: str) -> None:
        self.lines.append((Kind.NOTE, len(self.notes), 0))
        self.notes.append((style, text))

    def _wrap(self, block: Block) -> list[tuple[int, int]]:
        """Wraps a block's tokens at token boundaries; a token wider than a line is cut."""
        texts, width, spans = self.view.texts, self.width, list[tuple[int, int]]()
        # bound once: the loop below runs for every token of the episode
        add_token, add_text, add_cells = (
            self.piece_token.append,
            self.piece_text.append,
            self.piece_cells.append,
        )
        first, used = len(self.piece_token), 0

        def line() -> None:
            nonlocal first, used
            last = len(self.piece_token)
            if last > first:
                spans.append((first, last))
            first, used = last, 0

        for token in range(block.start, block.end):
            for shown, cells, ends in _segments(texts[token]):
                if used + cells > width:
                    if used:
                        line()
                    *full, shown = chop_cells(shown, width) if cells > width else [shown]
                    for head in full:
                        add_token(token), add_text(head), add_cells(cell_len(head))
                        line()
                    cells = cell_len(shown) if full else cells
                add_token(token), add_text(shown), add_cells(cells)
                used += cells
                if ends:
                    line()
        line()
        return spans

    def token_at(self, line: int, cell: int) -> int | None:
        """Return the token shown at a cell of a line, None if the line has no tokens."""
        kind, a, b = self.lines[line] if 0 <= line < len(self.lines) else (Kind.HEAD, 0, 0)
        if kind not in (Kind.TEXT, Kind.GLYPH):
            return None
        piece = a + bisect_right(list(accumulate(self.piece_cells[a:b])), cell)
        return self.piece_token[min(piece, b - 1)]

    def line_of(self, token: int) -> int:
        """Return the text line on which a token starts; the header of its block where that is folded."""
        if not self.piece_token:
            return 0
        piece = bisect_left(self.piece_token, token)
        hidden = piece >= len(self.piece_token) or self.piece_token[piece] != token
        block = self.view.block_of(token) if hidden or self.folded else 0
        if hidden or (self.folded and self.view.blocks[block].number in self.folded):
            return self.head_line[block] if self.head_line else 0
        return self._text_lines[bisect_right(self._text_first, piece) - 1]

    def cell_of(self, token: int) -> int:
        """Return the first cell of a token on its line."""
        kind, a, b = self.lines[self.line_of(token)]
        piece = bisect_left(self.piece_token, token, a, b) if kind == Kind.TEXT else b
        known = piece < b and self.piece_token[piece] == token
        return sum(self.piece_cells[a:piece]) if known else 0

    def text_line_near(self, line: int, step: int) -> int | None:
        """Return the next text line from `line` in direction `step` (±1), `line` excluded."""
        count = len(self.lines)
        down, up = range(max(line + 1, 0), count), range(min(line - 1, count - 1), -1, -1)
        return next((n for n in (down if step > 0 else up) if self.lines[n][0] == Kind.TEXT), None)


def call_notes(call: ToolCall) -> list[tuple[str, str]]:
    """Return a parsed call: name and arguments, code on its own lines; or the error of a malformed one."""
    if call.error:
        problem = [("error", f"  {line}") for line in call.error.splitlines()]
        return [("error", f"✗ malformed call {call.name}".rstrip()), *problem]
    out = [("call", f"▸ {call.name}")]
    for name, value in (call.arguments or {}).items():
        if isinstance(value, str) and "\n" in value:
            out.append(("argument", f"    {name}:"))
            out += [("code", f"    │ {line}") for line in value.splitlines()]
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            out.append(("argument", f"    {name}: {shown}"))
    if len(out) > MAX_NOTE_LINES:
        out = [*out[:MAX_NOTE_LINES], ("argument", f"    … {len(out) - MAX_NOTE_LINES} more lines")]
    return out


def result_notes(turn: Turn, images: Path | None = None) -> list[tuple[str, str]]:
    """Return a line per tool result (status, time, isolation level) and per image. Its text is in the tokens.

    `images`: the folder with the image files.
    """
    again = "DIVERGED when it was run again"
    out = [("error", f"◂ {turn.role}  {again}")] if turn.diverged else []
    for number, result in enumerate(turn.results):
        message = turn.messages[number : number + 1]
        name = str(message[0].get("name", "")) if message else ""
        diverged = result.metrics.get("diverged")
        parts = [
            f"◂  {name or f'result {number + 1}'}",
            f"ERROR {result.error}" if result.error else "ok",
            f"{result.seconds * 1000:.0f} ms",
            f"sandbox {result.isolation}" if result.level else "",
            again if diverged else "",
            "cut to its limit" if result.truncated else "",
            f"reward {result.reward:+.2f}" if result.reward is not None else "",
        ]
        loud = result.error or result.level == "bare" or diverged
        out.append(("error" if loud else "result", "  ".join(filter(None, parts))))
        out += _image_notes(result.images, message, images)
    return [*out, *_image_notes(turn.images, turn.messages, images)]


def _image_notes(
    shown: Sequence[bytes], messages: Sequence[Message], folder: Path | None
) -> Iterator[tuple[str, str]]:
    """Yield a line for each image of some messages."""
    sizes = [
        f"{part['width']}x{part['height']}" for message in messages for part in images_of(message)
    ]
    for image, size in zip(shown, [*sizes, *[""] * len(shown)], strict=False):
        yield "image", f"  ▣ {image_line(image, size, folder)}"


def head_text(block: Block, view: EpisodeView) -> str:
    """Return a block's header: its kind, its length, how it was sampled."""
    turn = block.turn
    link = continues(view.episode, turn.index) if turn is not None else ""
    parts = [f"TURN {block.number}/{len(view.blocks) - 1} {block.role}", link, f"{len(block)} tok"]
    if turn is not None and turn.player:
        parts[1:1] = [turn.player]
    if turn is None:
        parts.append("no turn stored for these tokens")
    elif turn.role == "assistant":
        stop, weights, run = turn.stop_reason, turn.weights_version, f"{view.run}@"
        parts += [
            f"{turn.seconds:.1f} s" if turn.seconds else "",
            f"ended by {stop}" if stop is not None and stop != "stop" else "",
            f"T={view.temperature:g}" if view.temperature is not None else "",
            # the first line of the screen names the run
            f"weights {'@' * weights.startswith(run)}{weights.removeprefix(run)}"
            if weights
            else "",
        ]
    else:
        parts += ["ERROR" * any(result.error for result in turn.results), "not trained"]
    return "  ".join(filter(None, parts))
