"""Bindings of the screens: their ids in a keymap file, and their actions in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from textual.binding import Binding, BindingType

CLOSING = (
    Binding("question_mark", "help", "keys"),
    Binding("q", "back", "back"),
    Binding("escape", "leave", show=False),
)
"""The last keys of a screen."""
FINDING = (
    Binding("slash", "find_text", "find"),
    Binding("full_stop", "find_again", "find again", show=False),
)
"""The keys that find text on a page."""


def moving(action: str, *, page: int = 0, end: int = 0) -> list[BindingType]:
    """Keys that call `action` with the number of lines to move by; without those for a page or an end if they are 0."""
    keys = (
        *(("j,down", 1, "down"), ("k,up", -1, "up")),
        *(("pagedown", page, ""), ("pageup", -page, "")),
        *(("g,home", -end, "first"), ("G,end", end, "last")),
    )
    return [
        Binding(key, f"{action}({step})", words, show=False) for key, step, words in keys if step
    ]


def named(screen: str, bindings: Iterable[BindingType]) -> list[BindingType]:
    """Return the bindings with ids as a keymap file uses them: `replay.tag`, `replay.turn.-1`, `replay.layer.logp`."""
    out: list[BindingType] = []
    for binding in bindings:
        assert isinstance(binding, Binding)
        action, _, rest = binding.action.partition("(")
        argument = rest.rstrip(")").strip("'")
        out.append(
            replace(
                binding, id=f"{screen}.{action}.{argument}" if argument else f"{screen}.{action}"
            )
        )
    return out


def describe(binding: Binding) -> str:
    """Return the action of a key in words: `turn(-1)`, described as `turn`, is `previous turn`."""
    action, _, rest = binding.action.partition("(")
    words = binding.description or action.replace("_", " ")
    try:
        step = float(rest.rstrip(")"))
    except ValueError:
        return words
    if action == "end":
        return f"{'last' if step else 'first'} {words.replace('end', '').strip()}".strip()
    if " " in words or words in ("first", "last"):
        return words  # `raise the rate`, `previous step`
    much = f" ×{abs(step):g}" if abs(step) > 1 else ""
    return f"{'next' if step > 0 else 'previous'} {words}{much}"
