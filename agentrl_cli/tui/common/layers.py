"""Layers: one number per token becomes a class, a class has a glyph, a colour and a meaning. Pure numpy, no textual.

Every colour has a glyph too, so a layer survives NO_COLOR and any kind of colour blindness (blue against orange, and
never red against green). In plain GRPO the advantage is one constant per episode, so the default layer is the push:
the step's change of each token's logit, on a scale that is fixed for the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.types import Float32, Origin, Tokens, TrainSignals

Classes = NDArray[np.int8]
"""[n] index into the layer's classes, per token."""


@dataclass(frozen=True, slots=True)
class Level:
    """One class of tokens: the glyph under them and the colour behind them."""

    glyph: str
    color: str
    """Background of the tokens, empty for none."""
    label: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A way to look at tokens. `classify` never fails: missing numbers are class 0."""

    name: str
    title: str
    levels: tuple[Level, ...]
    classify: Callable[[Tokens, TrainSignals | None, float], Classes]
    """Of (tokens, signals, the run's push scale)."""
    text: str
    """One line: what the glyphs show."""
    glyphs: str = "sampled"
    """The lines with a glyph row: `sampled`, `all` if other tokens have a meaning too, or `none`."""


PUSH_STEPS = 7
"""Classes of the push in each direction; each one is twice the one below."""
UP2, UP1, DOWN1, DOWN2 = "#1f5fbf", "#16395f", "#5f3a10", "#b86a10"
SEQ = ("", "#24303c", "#4a4420", "#7a5a14", "#b86a10")
CLIP = "#5a3a6a"

PALETTES: dict[str, dict[str, str]] = {
    "blue-orange": {},
    "bright": {
        UP1: "#0a4fb0", UP2: "#2f8bff", DOWN1: "#a04a00", DOWN2: "#ff8c1a", CLIP: "#a03aa0",
        SEQ[1]: "#28507a", SEQ[2]: "#8a7a10", SEQ[3]: "#c88a10", SEQ[4]: "#ff8c1a",
    },
    "purple-green": {
        UP1: "#1b4d2a", UP2: "#1b8a3c", DOWN1: "#4a2266", DOWN2: "#8e44c0", CLIP: "#5a5a20",
        SEQ[1]: "#2a2438", SEQ[2]: "#3f2f5c", SEQ[3]: "#623f92", SEQ[4]: "#8e44c0",
    },
    "grey": {
        UP1: "#3a3a3a", UP2: "#6e6e6e", DOWN1: "#303030", DOWN2: "#585858", CLIP: "#484848",
        SEQ[1]: "#262626", SEQ[2]: "#3a3a3a", SEQ[3]: "#4e4e4e", SEQ[4]: "#6e6e6e",
    },
}  # fmt: skip
"""Other colours for the same classes. Blue against orange and purple against green hold for every common kind of colour
blindness; grey leaves the meaning to the glyphs."""

_palette = PALETTES["blue-orange"]


def use_palette(name: str) -> None:
    """Draws with another palette from now on. Raises KeyError for an unknown one."""
    global _palette
    _palette = PALETTES[name]


def palette_name() -> str:
    """Return the palette in use."""
    return next(name for name, colors in PALETTES.items() if colors is _palette)


def shade(color: str) -> str:
    """Return a level's colour in the palette in use; `#rrggbb*k` is step k of PUSH_STEPS towards it."""
    full, _, step = color.partition("*")
    full = _palette.get(full, full)
    if not step:
        return full
    pairs = zip(bytes.fromhex("101014"), bytes.fromhex(full[1:]), strict=True)
    mixed = (round(dark + (light - dark) * int(step) / PUSH_STEPS) for dark, light in pairs)
    return f"#{bytes(mixed).hex()}"


_SIGNED = (
    Level(".", "", "not trained"),
    Level("0", "", "no push"),
    Level("+", UP1, "pushed up"),
    Level("#", UP2, "up, strong"),
    Level("-", DOWN1, "pushed down"),
    Level("=", DOWN2, "down, strong"),
    Level("~", CLIP, "clipped, left out"),
)


_PUSH = (
    Level(".", "", "not trained"),
    Level("0", "", "hardly moved"),
    *(Level(str(step), f"{UP2}*{step}", "up, doubling") for step in range(1, PUSH_STEPS + 1)),
    *(Level("abcdefg"[step - 1], f"{DOWN2}*{step}", "down") for step in range(1, PUSH_STEPS + 1)),
    Level("~", CLIP, "clipped, left out"),
)
"""Class 1 is a push too small to matter; then the steps up, the steps down, and the clipped tokens."""


def _push(tokens: Tokens, signals: TrainSignals | None, scale: float) -> Classes:
    """Return a class by size: the top one from the scale on, each class below from half as much, down to scale / 64."""
    out = np.zeros(len(tokens), np.int8)
    if signals is None:
        return out
    push = signals.push
    known = tokens.trained_mask & np.isfinite(push)
    out[known] = 1
    if scale > 0:
        # the small addend keeps a push at the very edge of a class in it, whichever way its log2 was rounded
        with np.errstate(divide="ignore", invalid="ignore"):
            step = np.floor(np.log2(np.abs(push) / scale) + 1e-6) + PUSH_STEPS
        seen = known & (step >= 1)
        size = np.minimum(step[seen], PUSH_STEPS).astype(np.int8)
        out[seen] = 1 + size + np.where(push[seen] < 0, PUSH_STEPS, 0).astype(np.int8)
    out[known & (signals.clipped > 0)] = len(_PUSH) - 1
    return out


def _classify_by_sign(
    tokens: Tokens,
    signals: TrainSignals | None,
    values_of: Callable[[TrainSignals], Float32],
    *,
    clipped: bool = False,
) -> Classes:
    """Return a class by sign and size; strong is at least half of the largest magnitude in the episode."""
    if signals is None:
        return np.zeros(len(tokens), np.int8)
    values = values_of(signals)
    known = tokens.trained_mask & np.isfinite(values)
    size = np.where(known, np.abs(values), 0)
    strong = (size >= size.max(initial=0) / 2) & (size > 0)
    out = np.where(known, np.select([values > 0, values < 0], [2, 4], 1) + strong, 0)
    if clipped:
        out[known & (signals.clipped > 0)] = 6
    return out.astype(np.int8)


def _classify_by_size(values: Float32, *edges: float) -> Classes:
    """Return class 1 + number of edges at or below the value; 0 where it is NaN."""
    bins = 1 + np.searchsorted(np.asarray(edges), values, side="right")
    return np.where(np.isfinite(values), bins, 0).astype(np.int8)


def _scale(*labels: str) -> tuple[Level, ...]:
    """Return five classes of growing strength after the first."""
    rest = zip("-=#!", SEQ[1:], labels[2:], strict=True)
    return Level(".", "", labels[0]), Level("_", SEQ[0], labels[1]), *(Level(*one) for one in rest)


_RATIO = (
    Level(".", "", "not trained"),
    Level("_", "", "within 1 %"),
    Level("<", DOWN1, "below 1"),
    Level(">", UP1, "above 1"),
    Level("~", CLIP, "clipped, left out"),
)
_MASK = (
    Level(".", "", "never trained"),
    Level("T", UP1, "sampled, may train"),
    Level("f", CLIP, "forced, not sampled"),
    Level("X", DOWN2, "BUG: weight on a token that was not sampled"),
)
_ORIGIN = (
    Level("t", "", "template"),
    Level("s", "#2d2d44", "system"),
    Level("u", "#3d3410", "user"),
    Level("o", "#4a2a10", "tool"),
    Level("m", UP1, "model"),
    Level("f", CLIP, "forced"),
)


def _ratio(tokens: Tokens, signals: TrainSignals | None) -> Classes:
    if signals is None:
        return np.zeros(len(tokens), np.int8)
    known = np.isfinite(signals.ratio) & tokens.trained_mask
    kinds = [signals.clipped > 0, signals.ratio > 1.01, signals.ratio < 0.99]
    return np.where(known, np.select(kinds, [4, 3, 2], 1), 0).astype(np.int8)


def find_leaks(tokens: Tokens, signals: TrainSignals) -> NDArray[np.bool_]:
    """Return [n] whether a token has a weight without having been sampled: then the mask is wrong."""
    weight = signals.weight
    return np.asarray(np.isfinite(weight) & (weight != 0) & ~tokens.trained_mask)


def _mask(tokens: Tokens, signals: TrainSignals | None) -> Classes:
    wrong = np.zeros(len(tokens), bool) if signals is None else find_leaks(tokens, signals)
    kinds = [wrong, tokens.origin == Origin.FORCED, tokens.trained_mask]
    return np.select(kinds, [3, 2, 1], 0).astype(np.int8)


def reference_kl(tokens: Tokens, signals: TrainSignals | None) -> Float32:
    """Return [n] float32, the k3 estimate of KL(policy ‖ reference) per token, NaN where either log-prob is missing."""
    if signals is None or signals.logp_ref is None:
        return np.full(len(tokens), np.nan, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        delta = signals.logp_ref - signals.logp_train
        return np.asarray(np.exp(delta) - delta - 1, np.float32)


LAYERS: dict[str, Layer] = {
    layer.name: layer
    for layer in (
        Layer("push", "push", _PUSH, _push,
              "how far the step moved this token: weight × (1 − p)"),
        Layer("advantage", "advantage", _SIGNED[:6],
              lambda tokens, signals, scale: _classify_by_sign(tokens, signals, lambda found: found.advantage),
              "the advantage: GRPO gives one to a whole episode"),
        Layer("logp", "log-probability", _scale("not sampled", "p ≥ .9", "p ≥ .5", "p ≥ .1", "p ≥ .01", "p < .01"),
              lambda tokens, signals, scale: _classify_by_size(-tokens.logp_policy, 0.1054, 0.6931, 2.3026, 4.6052),
              "how likely the policy found the token"),
        Layer("entropy", "entropy", _scale("not sampled", "< 0.1 nat", "< 0.5", "< 1", "< 2", "≥ 2"),
              lambda tokens, signals, scale: _classify_by_size(tokens.entropy, 0.1, 0.5, 1.0, 2.0),
              "how open the choice was, in nats"),
        Layer("ratio", "ratio and clipping", _RATIO, lambda tokens, signals, scale: _ratio(tokens, signals),
              "new policy over old; what was clipped"),
        Layer("mask", "trained mask", _MASK, lambda tokens, signals, scale: _mask(tokens, signals),
              "which tokens the loss may touch", glyphs="all"),
        Layer("origin", "origin", _ORIGIN,
              lambda tokens, signals, scale: np.clip(tokens.origin, 0, len(_ORIGIN) - 1).astype(np.int8),
              "who wrote the token", glyphs="all"),
        Layer("plain", "plain", (Level(" ", "", ""),),
              lambda tokens, signals, scale: np.zeros(len(tokens), np.int8), "the text alone", glyphs="none"),
        Layer("kl", "KL to the reference", _scale("no reference", "< .01", "< .1", "< .5", "< 2", "≥ 2"),
              lambda tokens, signals, scale: _classify_by_size(reference_kl(tokens, signals), 0.01, 0.1, 0.5, 2.0),
              "how far the policy is from the reference"),
        Layer("weight", "gradient weight", _SIGNED,
              lambda tokens, signals, scale: _classify_by_sign(
                  tokens, signals, lambda found: found.weight, clipped=True),
              "−∂L/∂log p of the policy's loss"),
    )
}  # fmt: skip
"""Keys 1 to 9 and 0, in this order."""


def default_layer(tokens: Tokens, signals: TrainSignals | None) -> str:
    """Return the layer shown first: the push, the log-probability if nothing was trained, plain if nothing sampled."""
    if signals is not None:
        return "push"
    return "logp" if tokens.trained_mask.any() else "plain"


def layer_key(number: int) -> str:
    """Return the key of the layer with an index in LAYERS."""
    return str((number + 1) % 10)


def map_line(classes: Classes, n_levels: int, width: int) -> list[int]:
    """Return the whole episode in at most `width` columns: each shows its marked tokens' commonest class, else 0."""
    out: list[int] = []
    edges = np.linspace(0, len(classes), max(min(width, len(classes)), 1) + 1).astype(int)
    for part in np.split(classes, edges[1:-1]):
        # class 0 never outvotes the others: a lone trained token in a long observation still shows
        marked = np.bincount(part, minlength=n_levels)[1:]
        out.append(int(np.argmax(marked)) + 1 if marked.any() else 0)
    return out if len(classes) and width > 0 else []
