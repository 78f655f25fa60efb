"""The store behind a screen: one thread with one connection, so that no query ever blocks the painting.

Screens `await reader.call(function, …)`; the function gets the open store as its first argument and runs in the
reader's thread. Writing (controls, tags, notes) opens a second, writing connection in the same thread, on first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from agentrl_cli.store import Store
from agentrl_cli.tui.common.episode_view import EpisodeView, Fork, fork_of
from agentrl_cli.tui.common.load_episode import Scales, holds_secret, load_view
from agentrl_cli.tui.common.token_text import TokenTexts

P = ParamSpec("P")
T = TypeVar("T")


class Reader:
    """Runs functions over the store in its own thread, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._store: Store | None = None
        self._writer: Store | None = None
        self._decoders: dict[str, TokenTexts] = {}
        self._scales: Scales = {}

    async def call(
        self, function: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of `function(store, …)`, computed in the reader's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, lambda: function(self._open(), *args, **kwargs)
        )

    async def write(
        self, function: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Calls a function as `call` does, with a writable store; everything is committed before this returns."""

        def run() -> T:
            if self._writer is None:
                self._writer = Store.open(self.path)
            result = function(self._writer, *args, **kwargs)
            self._writer.flush()
            return result

        return await asyncio.get_running_loop().run_in_executor(self._pool, run)

    async def view(self, episode_id: str) -> EpisodeView:
        """Return everything of one episode, ready to show. Raises NotFound."""
        return await self.call(
            lambda store: load_view(store, episode_id, self._decoders, self._scales)
        )

    async def fork(self, view: EpisodeView, sibling: str) -> Fork | None:
        """Return the first differing token between the shown episode and a sibling."""
        return await self.call(lambda store: fork_of(view, store.episodes.get(sibling)))

    async def holds_secret(self, episode_id: str) -> bool:
        """Whether a picture of the episode would show a likely secret. Raises NotFound."""
        return await self.call(holds_secret, episode_id, self._decoders)

    async def export(self, episode_ids: Sequence[str], path: Path) -> None:
        """Writes episodes, a JSON line each. Raises StoreError if the file cannot be written."""
        from agentrl_cli.reports.export import export_lines, write_lines

        await self.call(lambda store: write_lines(export_lines(store, episode_ids), path))

    def close(self) -> None:
        """Closes the connections after the queued calls."""

        def run() -> None:
            for store in (self._store, self._writer):
                if store is not None:
                    store.close()

        self._pool.submit(run)
        self._pool.shutdown(wait=True)

    def _open(self) -> Store:
        if self._store is None:
            self._store = Store.open(self.path, readonly=True)
        return self._store
