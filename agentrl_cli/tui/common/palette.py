"""The command palette (ctrl+p): every action of the screen in words, with its key and id."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider

from agentrl_cli.tui.common.bindings import describe
from agentrl_cli.tui.common.settings import read_settings, settings_path


class KeyCommands(Provider):
    """The bindings of the screen below the palette, with the keys of the user's keymap."""

    async def startup(self) -> None:
        self._own = read_settings(settings_path()).keys

    def _all(self) -> Iterator[tuple[str, str, Callable[[], Coroutine[Any, Any, bool]]]]:
        """Yields (words, help, function), each action once."""
        seen: set[str] = set()
        for binding in type(self.screen).BINDINGS:
            if not isinstance(binding, Binding) or binding.action in seen:
                continue
            seen.add(binding.action)
            name = binding.id or ""
            yield (
                describe(binding),
                f"{self._own.get(name, binding.key)}   {name}",
                self._runner(binding.action),
            )

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
