"""The command palette (ctrl+p): everything the screen's keys do, by words, with the key and its id."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider

from agentrl_cli.tui.common.settings import read_settings, settings_path


def said(binding: Binding) -> str:
    """What a key does, in words: `turn(-1)`, described as `turn`, is `previous turn`."""
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


class KeyCommands(Provider):
    """The bindings of the screen below the palette, with a person's own keys where they have some."""

    async def startup(self) -> None:
        self._own = read_settings(settings_path()).keys

    def _all(self) -> Iterator[tuple[str, str, Callable[[], Coroutine[Any, Any, bool]]]]:
        """(words, help, what to run), each action once."""
        seen: set[str] = set()
        for binding in type(self.screen).BINDINGS:
            if not isinstance(binding, Binding) or binding.action in seen:
                continue
            seen.add(binding.action)
            name = binding.id or ""
            yield said(binding), f"{self._own.get(name, binding.key)}   {name}", self._runner(binding.action)

    def _runner(self, action: str) -> Callable[[], Coroutine[Any, Any, bool]]:
        async def run() -> bool:
            return await self.app.run_action(action, self.screen)

        return run

    async def discover(self) -> Hits:
        for words, help, run in self._all():
            yield DiscoveryHit(words, run, help=help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for words, help, run in self._all():
            score = max(matcher.match(words), matcher.match(help))
            if score > 0:
                yield Hit(score, matcher.highlight(words), run, help=help)
