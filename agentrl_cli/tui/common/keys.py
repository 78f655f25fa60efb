"""Keys of the screens: their ids in a keymap file, their actions in words, and all of them in the command palette."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.screen import Screen

from agentrl_cli.tui.common.settings import own_keys

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
    """Return keys that call `action` with the lines to move by; none for a page or an end if that is 0."""
    keys = (
        *(("j,down", 1, "down"), ("k,up", -1, "up")),
        *(("pagedown", page, ""), ("pageup", -page, "")),
        *(("g,home", -end, "first"), ("G,end", end, "last")),
    )
    return [
        Binding(key, f"{action}({step})", words, show=False) for key, step, words in keys if step
    ]


def with_ids(screen: str, bindings: Iterable[BindingType]) -> list[BindingType]:
    """Return the bindings with ids as a keymap file uses them: `replay.tag`, `replay.turn.-1`, `replay.layer.logp`."""
    out: list[BindingType] = []
    for binding in bindings:
        assert isinstance(binding, Binding)
        action, _, rest = binding.action.partition("(")
        parts = (screen, action, rest.rstrip(")").strip("'"))
        out.append(replace(binding, id=".".join(filter(None, parts))))
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


def describe_keys(screen: Screen[object]) -> list[tuple[Binding, str]]:
    """Return the bindings of a screen with their actions in words."""
    keys = type(screen).BINDINGS
    return [(key, describe(key)) for key in keys if isinstance(key, Binding)]


class KeyCommands(Provider):
    """The bindings of the screen below the palette, each action once, with the keys of the user's keymap."""

    def _all(self) -> Iterator[DiscoveryHit]:
        own, actions = own_keys(), dict[str, tuple[Binding, str]]()
        for key, words in describe_keys(self.screen):
            actions.setdefault(key.action, (key, words))
        for action, (key, words) in actions.items():
            run = partial(self.app.run_action, action, self.screen)
            yield DiscoveryHit(words, run, help=f"{own.get(key.id or '', key.key)}   {key.id}")

    async def discover(self) -> Hits:
        for hit in self._all():
            yield hit

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for hit in self._all():
            words, help = str(hit.display), hit.help or ""
            score = max(matcher.match(words), matcher.match(help))
            if score > 0:
                yield Hit(score, matcher.highlight(words), hit.command, help=help)
