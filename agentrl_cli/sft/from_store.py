"""Rejection-sampling fine-tuning: the store's best episodes as demonstrations, by the very ids that were sampled.

Nothing is decoded and encoded again: an episode's tokens and its mask are what is trained, so what the model learns is
what it (or a teacher with the same tokenizer) really said. https://arxiv.org/abs/2308.01825
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.learning.dispositions import flaw
from agentrl_cli.learning.packing import Segment, segments_of
from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.types import Episode

DEFAULT_FILTER = "outcome:solved"


def choose(
    store: Store,
    filter: str,
    tokenizer: str,
    best_of: int | None = None,
    vocabulary: int | None = None,
    narrate: Callable[[str], None] = lambda text: None,
) -> list[Episode]:
    """Return the episodes that match, oldest first: graded, with sampled tokens, no two of a task with the same ids.

    Args:
        filter: In the language of `ls --filter`; empty: those that were solved.
        tokenizer: Hash of the tokenizer of the model to be trained; ids of another one mean something else.
        best_of: At most so many of each task, those with the highest reward (of equal ones the shortest).
        vocabulary: Ids that the model knows. Episodes with others, or with impossible log-probabilities, are left out.
        narrate: Is given a line about those, about those without sampled tokens, and about those of evaluations.
    Raises NotFound where none is left, UsageError where some come from another tokenizer.
    """
    rows = store.episodes.rows(store.episodes.ids(filter or DEFAULT_FILTER, "time"))
    rows = _select_sampled(rows, narrate)
    _require_tokenizer(rows, tokenizer)
    ranked = rows if best_of is None else sorted(rows, key=_worth)
    found: dict[str, Episode] = {}
    seen: set[tuple[Any, ...]] = set()
    counts: dict[tuple[str, str], int] = {}
    bad: list[str] = []
    for row in ranked:
        task = (row.pack, row.task_id)
        if best_of is not None and counts.get(task, 0) >= best_of:
            continue
        episode = store.episodes.get(row.id)
        if why := flaw(episode, vocabulary):
            bad.append(f"{row.id}: {why}")
            continue
        same = (*task, episode.tokens.ids.tobytes(), () if episode.linear else episode.branches)
        if same not in seen and episode.tokens.trained_mask.any():
            seen.add(same)
            counts[task] = counts.get(task, 0) + 1
            found[row.id] = episode
    if bad:
        why = f"no model can have sampled what is stored ({bad[0]})"
        narrate(f"{len(bad)} episodes are left out: {why}")
    if not found:
        raise NotFound(
            f"No episode to train on matches {filter or DEFAULT_FILTER!r}.",
            hint="Trained are tokens that a model sampled: `agentrl rollout` makes some, `agentrl ls -f …` shows"
            " what a filter finds.",
        )
    return [found[row.id] for row in rows if row.id in found]


def _select_sampled(rows: Sequence[EpisodeRow], narrate: Callable[[str], None]) -> list[EpisodeRow]:
    """Return the graded rows with sampled tokens; narrate how many have none, and how many are of evaluations."""
    graded = [row for row in rows if row.outcome is not None and not row.outcome.is_error]
    found = [row for row in graded if row.n_model_tokens]
    if len(found) < len(graded):
        count = f"{len(graded) - len(found)} of {len(graded)} episodes"
        narrate(
            f"{count} are left out: no model of this store sampled their tokens (imported, or never asked)."
        )
    if tested := sum(row.kind == "eval" and row.split != "train" for row in found):
        narrate(
            f"{tested} of {len(found)} episodes are attempts of evaluations: their tasks do not measure a model that"
            " has learned from them. -kind:eval in the filter leaves them out."
        )
    return found


def _require_tokenizer(rows: Sequence[EpisodeRow], tokenizer: str) -> None:
    foreign = [row for row in rows if row.tokenizer != tokenizer]
    if foreign:
        raise UsageError(
            f"{len(foreign)} of {len(rows)} episodes were sampled with another tokenizer ({foreign[0].id} for one).",
            hint="Train the model that they come from, or one with the same tokenizer, or filter them out.",
        )


def _worth(row: EpisodeRow) -> tuple[bool, float, int]:
    """Return the highest reward first, of equal ones the shortest; ungraded ones last."""
    return row.reward is None, -(row.reward or 0.0), row.n_model_tokens


def batches(episodes: Sequence[Episode], rows: int, seed: int) -> Iterator[list[list[Segment]]]:
    """Endless batches of `rows` episodes, each once an epoch in a new order; those of a task share their prompt.

    An episode that branches is several segments, in which each of its sampled tokens is trained once. A token counts
    among all others, whatever it was drawn from: among the few that top-p had left, there would be little to learn.
    """
    for batch in shuffled(len(episodes), rows, f"rft {seed}"):
        groups: dict[tuple[str, str], list[Segment]] = {}
        for episode in (episodes[number] for number in batch):
            segments = [replace(segment, support=None) for _, segment in segments_of(episode)]
            groups.setdefault((episode.pack, episode.task_id), []).extend(segments)
        yield list(groups.values())


def shuffled(count: int, size: int, seed: str) -> Iterator[list[int]]:
    """Yield batches of `size` numbers below `count` without end, each once an epoch in a new order."""
    order, queue = list(range(count)), list[int]()
    for epoch in itertools.count():
        random.Random(f"{seed} {epoch}").shuffle(order)
        queue += order
        while len(queue) >= size:
            yield queue[:size]
            del queue[:size]
