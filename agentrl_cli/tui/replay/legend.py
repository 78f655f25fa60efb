"""The legend of a layer, and the map of an episode under it, as lines of rich text. Pure."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from agentrl_cli.tui.common.episode_view import EpisodeView
from agentrl_cli.tui.common.layers import LAYERS, Classes, Layer, layer_key, map_line, shade
from agentrl_cli.tui.common.text import FAINT, HERE, TITLE, wrap

MAP_GUTTER = 5
"""Columns before the map."""


def legend_lines(layer: Layer, width: int = 28) -> list[Text]:
    """Return the layer's classes with their glyphs, and the keys of all layers."""
    lines = [Text(f"LAYER {layer.title}"[:width], TITLE)]
    lines += [Text(f" {part}", FAINT) for part in wrap(layer.text, width - 1)]
    for label, levels in groupby(layer.levels, lambda level: level.label):
        if label:
            text = Text(" ", no_wrap=True)
            for level in (shown := list(levels)):
                glyph = level.glyph * (2 if len(shown) == 1 else 1)
                text.append(glyph, f"#ffffff on {shade(level.color)}" if level.color else FAINT)
            lines.append(text.append(f" {label}", FAINT))
    line = ""
    for index, name in enumerate(LAYERS):
        word = f"{layer_key(index)} {name}{'*' if name == layer.name else ''}"
        if len(line) + len(word) + 1 > width:
            lines.append(Text(line, FAINT))
            line = ""
        line = f"{line} {word}".strip()
    lines.append(Text(line, FAINT))
    return lines


def legend_strip(layer: Layer, width: int) -> Text:
    """Return the layer's legend in one line, for small terminals."""
    line = Text(f"{layer.name} ", TITLE, no_wrap=True)
    for label, levels in groupby(layer.levels, lambda level: level.label):
        if label and line.cell_len + len(label) + 4 <= width:
            for level in levels:
                line.append(
                    level.glyph, f"#ffffff on {shade(level.color)}" if level.color else FAINT
                )
            line.append(f" {label}  ", FAINT)
    return line


def map_lines(
    view: EpisodeView, layer: Layer, classes: Classes, cursor: int, width: int
) -> list[Text]:
    """Return the whole episode in one line: the layer, the turns under it, and where the cursor is."""
    n = len(view.tokens)
    if not n:
        return [Text("MAP  no tokens stored", FAINT)]
    inner = min(max(width - MAP_GUTTER, 8), n)
    columns = map_line(classes, len(layer.levels), inner)
    title = Text(f"MAP  {n:,} tokens, {view.episode.trained_tokens:,} sampled", TITLE, no_wrap=True)
    loss = Text(f"{layer.name[:4]:<5}", FAINT, no_wrap=True)
    for level in columns:
        color = shade(layer.levels[level].color)
        loss.append(layer.levels[level].glyph, f"#ffffff on {color}" if color else FAINT)
    row = ["."] * inner
    for block in view.blocks:
        column = min(block.start * inner // n, inner - 1)
        for offset, char in enumerate(str(block.number)):
            if column + offset < inner:
                row[column + offset] = char
    caret = " " * (5 + min(cursor * inner // n, inner - 1)) + "^"
    return [
        title,
        loss,
        Text("turn " + "".join(row), FAINT, no_wrap=True),
        Text(caret, HERE, no_wrap=True),
    ]


def token_on_map(view: EpisodeView, column: int, width: int) -> int | None:
    """Return the token at a column of `map_lines`, drawn `width` wide."""
    n = len(view.tokens)
    inner = min(max(width - MAP_GUTTER, 8), n)
    at = column - MAP_GUTTER
    return min(at * n // inner, n - 1) if n and 0 <= at < inner else None
