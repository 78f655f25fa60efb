"""The store behind a screen: one thread with one connection, so that no query ever blocks the painting; and one episode
read from a store as a view, for the screens and `--plain`. No textual.

Screens `await reader.call(function, …)`; the function gets the open store as its first argument and runs in the
reader's thread. Writing (controls, tags, notes) opens a second, writing connection in the same thread, on first use.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from agentrl_cli.reports.reference import get_setting
from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.tui.common.episode_view import (
    EpisodeView,
    Fork,
    contrasting_sibling,
    fork_of,
    make_view,
)
from agentrl_cli.tui.common.token_text import TokenTexts, visible
from agentrl_cli.types import Episode

P = ParamSpec("P")
T = TypeVar("T")
Scales = dict[str | None, float]
"""Push scale by run."""


def load_view(
    store: Store,
    episode_id: str,
    scales: Scales | None = None,
) -> EpisodeView:
    """Read an episode as a view; values that are not stored yet are left out. `scales`: a cache. Raises NotFound."""
    row = store.episodes.row(episode_id)
    episode = store.episodes.get(row.id)
    run = store.runs.get(row.run_id) if row.run_id else None
    settings = run.config if run is not None and episode.kind == "train" else {}
    temperature = get_setting(settings, "rollout.temperature")
    scales = {} if scales is None else scales
    if not scales.get(episode.run_id):  # 0: nothing was trained yet
        scales[episode.run_id] = store.signals.push_scale(episode.run_id)
    live = ""
    if episode.outcome is None:
        live = next(
            (item.text for item in store.live.all(row.run_id) if item.episode_id == row.id), ""
        )
    return make_view(
        episode,
        decoder_of(store, row.tokenizer),
        signals=store.signals.get(row.id),
        siblings=store.episodes.siblings(row.id),
        flags=flags_of(store, episode, row.flags),
        tags=row.tags,
        note=row.note,
        run=run.name if run is not None else "",
        scores=store.scores.get(row.id),
        picked=store.episodes.group_reason(row.group_id, row.run_id),
        live=live,
        images=store.path.parent / "images" if isinstance(store.path, Path) else None,
        push_scale=scales[episode.run_id],
        temperature=float(temperature) if isinstance(temperature, (int, float)) else None,
    )


@lru_cache(maxsize=8)
def decoder_of(store: Store, digest: str) -> TokenTexts:
    """Return the decoder of a stored tokenizer by its hash; one that shows ids if none is stored."""
    stored = store.tokenizers.get(digest) if digest else None
    return TokenTexts(stored.tokenizer_json if stored is not None else None)


def token_texts(store: Store, row: EpisodeRow, ids: list[int]) -> list[str]:
    """Return the text of every token, by the stored tokenizer, for the HTML export."""
    return decoder_of(store, row.tokenizer).texts(ids)


def flags_of(store: Store, episode: Episode, stored: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (name, evidence) of the rules over the episode, of stored flags that no rule explains, and of drift."""
    from agentrl_cli.rollout.flags import find_flags

    drift = store.marks.drift(episode.id)
    found = [
        (flag.name, flag.evidence) for flag in find_flags(episode, [row.kind for row in drift])
    ]
    names = {name for name, _ in found}
    found += [(name, "") for name in stored if name not in names]
    for row in drift:
        texts = f"expected {visible(row.expected)!r}, got {visible(row.got)!r}"
        found.append((f"{row.kind} drift", f"turn {row.turn}, token {row.position}: {texts}"))
    return found


def holds_secret(store: Store, episode_id: str) -> bool:
    """Whether replay may show a likely secret: in this episode, or in the sibling it is compared with.

    A picture of the screen masks nothing; check before drawing one. Raises NotFound.
    """
    view = load_view(store, episode_id)
    sibling = contrasting_sibling(view)
    return _secret_in(view) or (sibling is not None and _secret_in(load_view(store, sibling)))


def _secret_in(view: EpisodeView) -> bool:
    from agentrl_cli.reports.export import episode_object
    from agentrl_cli.types.masking import mask

    texts = ["".join(view.texts), view.live, view.note, *view.tags, *map(str, view.reasons)]
    shown = [episode_object(view.episode, tokens=False), *texts]
    return json.dumps(mask(shown), default=str) != json.dumps(shown, default=str)


class Reader:
    """Runs functions over the store in its own thread, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._store: Store | None = None
        self._writer: Store | None = None
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
        return await self.call(lambda store: load_view(store, episode_id, self._scales))

    async def fork(self, view: EpisodeView, sibling: str) -> Fork | None:
        """Return the first differing token between the shown episode and a sibling."""
        return await self.call(lambda store: fork_of(view, store.episodes.get(sibling)))

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
