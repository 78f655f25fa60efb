"""Replay without a screen: the same panes printed, for pipes, CI and `TERM=dumb`. Imports no textual."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from agentrl_cli.store import Store
from agentrl_cli.tui.common.episode_view import EpisodeView, contrasting_sibling, fork_of
from agentrl_cli.tui.common.layers import LAYERS, Layer, default_layer
from agentrl_cli.tui.common.layout import Kind, Layout, head_text
from agentrl_cli.tui.common.reader import load_view
from agentrl_cli.tui.common.text import BAD, FAINT
from agentrl_cli.tui.replay import inspector, panels
from agentrl_cli.types import Origin


def replay_lines(
    store: Store, episode_id: str, *, layer: str = "", width: int = 100
) -> Iterator[Text]:
    """Return everything of one episode as lines. `layer`: by default `default_layer`."""
    view = load_view(store, episode_id)
    lens = LAYERS[layer or default_layer(view.tokens, view.signals)]
    yield panels.header(view)
    yield Text("")
    yield from panels.group_lines(view, width, limit=64)
    yield Text("")
    yield from transcript_lines(view, lens, width)
    yield Text("")
    yield from panels.map_lines(view, lens, view.classes(lens), 0, width)[:-1]
    yield from panels.legend_lines(lens, width)[:-1]
    yield Text("")
    sibling = contrasting_sibling(view)
    if sibling is not None:
        yield from panels.fork_lines(fork_of(view, store.episodes.get(sibling)), view, width)
        yield Text("")
    yield from inspector.reward_lines(view, min(width, 60))
    yield Text("")
    yield from inspector.reason_lines(view, width)


def transcript_lines(view: EpisodeView, layer: Layer, width: int) -> Iterator[Text]:
    """Yield the tokens with the layer's glyphs under those that were sampled."""
    layout = Layout(view, width, glyphs=layer.glyphs)
    classes = view.classes(layer)
    for kind, a, b in layout.lines:
        if kind == Kind.HEAD:
            yield Text(f"--- {head_text(view.blocks[a], view)} ---"[:width], "bold")
        elif kind == Kind.NOTE and a in layout.pictures:
            yield Text.assemble(
                "    ",
                *((part.text, part.style or "") for part in layout.pictures[a]),
                no_wrap=True,
            )
        elif kind == Kind.NOTE:
            yield Text(layout.notes[a][1], BAD if layout.notes[a][0] == "error" else FAINT)
        elif kind == Kind.TEXT:
            yield Text("".join(layout.piece_text[a:b]), no_wrap=True)
        else:
            marks = [
                layer.levels[classes[layout.piece_token[p]]].glyph * layout.piece_cells[p]
                for p in range(a, b)
            ]
            yield Text("".join(marks), FAINT, no_wrap=True)


_TRAINED = (
    *("advantage", "logp_train", "ratio", "clipped", "weight", "logp_ref", "value", "returns"),
    *("logp_teacher", "reward_advantage"),
)


def token_rows(store: Store, episode_id: str) -> Iterator[dict[str, object]]:
    """Return one object per token with all stored numbers, NaN for missing ones."""
    view = load_view(store, episode_id)
    tokens, signals = view.tokens, view.signals
    arrays = {name: getattr(tokens, name) for name in ("logp_sampled", "logp_policy", "entropy")}
    if signals is not None:
        arrays |= {name: getattr(signals, name) for name in (*_TRAINED, "push")}
    for token, text in enumerate(view.texts):
        yield {
            "position": token,
            "turn": view.block_of(token),
            "id": int(tokens.ids[token]),
            "text": text,
            "origin": Origin(int(tokens.origin[token])).name.lower(),
            **{name: float(array[token]) for name, array in arrays.items() if array is not None},
            "top": [[text, p] for text, p, _ in inspector.top_alternatives(view, token)],
        }
