"""Reads one episode from a store as a view, for the screens and `--plain`. No textual."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.tui.common.episode_view import EpisodeView, contrasting_sibling, make_view
from agentrl_cli.tui.common.token_text import TokenTexts, visible
from agentrl_cli.types import Episode

Scales = dict[str | None, float]
"""Push scale by run."""


def load_view(
    store: Store,
    episode_id: str,
    decoders: dict[str, TokenTexts] | None = None,
    scales: Scales | None = None,
) -> EpisodeView:
    """Read an episode as a view; values that are not stored yet are left out. `scales`: a cache. Raises NotFound."""
    row = store.episodes.row(episode_id)
    episode = store.episodes.get(row.id)
    run = store.runs.get(row.run_id) if row.run_id else None
    sampling = run.config.get("rollout") if run is not None and episode.kind == "train" else None
    temperature = sampling.get("temperature") if isinstance(sampling, dict) else None
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
        decoder_of(store, row.tokenizer, {} if decoders is None else decoders),
        signals=store.signals.get(row.id),
        siblings=store.episodes.siblings(row.id),
        flags=flags_of(store, episode, row.flags),
        tags=row.tags,
        note=row.note,
        run=run.name if run is not None else "",
        scores=[
            (s.name, s.reward, s.delta, s.advantage, s.turns) for s in store.scores.get(row.id)
        ],
        picked=store.episodes.group_reason(row.group_id, row.run_id),
        live=live,
        images=store.path.parent / "images" if isinstance(store.path, Path) else None,
        push_scale=scales[episode.run_id],
        temperature=float(temperature) if isinstance(temperature, (int, float)) else None,
    )


def decoder_of(store: Store, digest: str, cache: dict[str, TokenTexts]) -> TokenTexts:
    """Return the decoder of a stored tokenizer, cached by hash; one that shows ids if none is stored."""
    if digest not in cache:
        stored = store.tokenizers.get(digest) if digest else None
        cache[digest] = TokenTexts(stored.tokenizer_json if stored is not None else None)
    return cache[digest]


def token_texts(store: Store, row: EpisodeRow, ids: list[int]) -> list[str]:
    """Return the text of every token, by the stored tokenizer, for the HTML export."""
    return decoder_of(store, row.tokenizer, {}).texts(ids)


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


def holds_secret(
    store: Store, episode_id: str, decoders: dict[str, TokenTexts] | None = None
) -> bool:
    """Whether replay may show a likely secret: in this episode, or in the sibling it is compared with.

    A picture of the screen masks nothing; check before drawing one. Raises NotFound.
    """
    view = load_view(store, episode_id, decoders)
    sibling = contrasting_sibling(view)
    return _secret_in(view) or (
        sibling is not None and _secret_in(load_view(store, sibling, decoders))
    )


def _secret_in(view: EpisodeView) -> bool:
    from agentrl_cli.reports.export import episode_object
    from agentrl_cli.store.display import mask

    texts = ["".join(view.texts), view.live, view.note, *view.tags, *map(str, view.reasons)]
    shown = [episode_object(view.episode, tokens=False), *texts]
    return json.dumps(mask(shown), default=str) != json.dumps(shown, default=str)
