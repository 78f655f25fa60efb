"""Groups of episodes in one row of tokens, without padding and with a group's prefix computed once.

`pack` lays groups of episodes into one row: the common prefix of a group's episodes (their prompt, and beyond it as far
as they agree) is in it once. Not here: the forward pass over the row (forward.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.inference.kv_cache import common
from agentrl_cli.learning.attention import Block
from agentrl_cli.types import Branch, Episode, Int32, Support, group_pairs, no_support

_LOG = logging.getLogger(__name__)
Bool = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """One token sequence as the forward sees it: an episode, or a branch of one."""

    ids: Int32
    """[n] token ids."""
    trained: Bool
    """[n] True where the token's log-probability is wanted; the first token has none and must be False."""
    images: tuple[bytes, ...] = ()
    """The images that the ids have tokens for, in order."""
    support: Support | None = None
    """[n] the tokens that each trained one was drawn from, if its log-probability is taken among them."""

    @classmethod
    def of(cls, episode: Episode, branch: Branch | None = None) -> Segment:
        """One of `episode.sequences`; without a name the only one. Raises ValueError if there are several."""
        if branch is None:
            (branch,) = episode.sequences
        chain = episode.chain(branch)
        return cls(chain.tokens.ids, branch.trained, chain.images, chain.tokens.support)


def segments_of(episode: Episode) -> list[tuple[Branch, Segment]]:
    """Return the branches of an episode that train a token, each with its segment; of an episode with one branch that
    one.

    A branch trains nothing if all it sampled lies on earlier ones: a fork that no answer of the model followed.
    """
    branches = episode.sequences
    kept = [branch for branch in branches if branch.trained.any()] or branches[:1]
    return [(branch, Segment.of(episode, branch)) for branch in kept]


@dataclass(frozen=True, slots=True)
class Packed:
    """Groups of episodes in one row of T tokens, M of whose successors are trained."""

    input_ids: Ints
    """[T]"""
    position_ids: Ints
    """[T] position within the token's episode."""
    blocks: tuple[Block, ...]
    rows: Ints
    """[M] the row whose hidden state predicts the trained token."""
    targets: Ints
    """[M] id of the trained token."""
    episode: Ints
    """[M] which episode it belongs to, counted over the groups in the order given; ascending."""
    support: Support | None = None
    """[M] the tokens that each target was drawn from; None: all targets from the whole vocabulary."""
    images: tuple[tuple[bytes, ...], ...] = ()
    """The images of each continuation that is not empty; () without images."""

    @property
    def tokens(self) -> int:
        """Tokens of the forward, T."""
        return len(self.input_ids)


def pack(groups: Sequence[Sequence[Segment]]) -> Packed:
    """Return one row of groups of episodes, the prefix of each group once.

    Tokens behind the last trained one of an episode, and that one itself, predict nothing: they are left out.
    """
    ids: list[Int32] = [np.zeros(0, np.int32)]
    positions: list[Ints] = [np.zeros(0, np.int64)]
    rows, targets, lengths = list(positions), list(ids), []
    blocks, images, support = [], [], [no_support(0)]
    size = 0
    for group in groups:
        needed = [_cut_needed(segment) for segment in group]
        shared = _count_shared(group, [own for own in needed if len(own)])
        prefix = next(own for own in needed if len(own))[:shared] if shared else ids[0]
        ids.append(prefix)
        positions.append(np.arange(shared))
        start, size = size, size + shared
        ends: list[int] = []
        for segment, own in zip(group, needed, strict=True):
            where = _find_trained(segment)
            rows.append(np.where(where <= shared, start, size - shared) + where - 1)
            targets.append(segment.ids[where])
            lengths.append(len(where))
            support.append(
                no_support(len(where)) if segment.support is None else segment.support[where]
            )
            if len(own):
                ids.append(own[shared:])
                positions.append(np.arange(shared, len(own)))
                size += len(own) - shared
                ends.append(size)
                images += [segment.images] if len(own) > shared else []
        if size > start:
            blocks.append(Block(start, start + shared, tuple(ends)))
    drawn = np.concatenate(support)
    return Packed(
        np.concatenate(ids).astype(np.int64),
        np.concatenate(positions),
        tuple(blocks),
        np.concatenate(rows),
        np.concatenate(targets).astype(np.int64),
        np.repeat(np.arange(len(lengths)), lengths).astype(np.int64),
        drawn if any(one is not None for one in drawn) else None,
        tuple(images) if any(images) else (),
    )


def _find_trained(segment: Segment) -> Ints:
    """Return the places of the trained tokens."""
    if len(segment.trained) != len(segment.ids):
        raise ValueError("ids and trained differ in length")
    if len(segment.trained) and segment.trained[0]:
        raise ValueError(
            "the first token of an episode has no log-probability: nothing precedes it"
        )
    return np.flatnonzero(segment.trained)


def micro_batches(
    groups: Sequence[Sequence[Segment]], budget: int, longest: int | None = None, switch: int = 0
) -> list[list[tuple[int, int]]]:
    """Split groups into rows of at most `budget` packed tokens: lists of (group, member), each member once, in order.

    Episodes of more than `switch` tokens are in rows of their own, after those of fewer: see `switch_length`.

    A group larger than the budget is a row of its own up to `longest` tokens, so that its prefix is computed once;
    beyond that it is split, and its prefix computed in each of its rows. An episode larger than the budget is a row of
    its own. `select_segments` makes a row's groups.
    """
    out: list[list[tuple[int, int]]] = []
    used, long = 0, False
    for g, group in enumerate(groups):
        shared, costs = _costs(group)
        most = budget if not shared or shared + sum(costs) <= budget else max(budget, longest or 0)
        if not out or used + shared + sum(costs) > budget:
            out.append([])
            used = 0
        used += shared
        kinds = [0 < switch < shared + cost for cost in costs]
        for m in sorted(range(len(costs)), key=kinds.__getitem__):
            cost = costs[m]
            if out[-1] and (used + cost > most or kinds[m] != long):
                out.append([])
                used = shared
            long = kinds[m]
            out[-1].append((g, m))
            used += cost
    return [row for row in out if row]


class Rows:
    """Cuts groups into micro-batches, in which a group's prompt is computed once as far as memory allows.

    Args:
        budget: Tokens of a micro-batch.
        row_tokens: Returns how many tokens of a group the memory holds, with all activations and at most, if one is
            larger than the budget; None: the budget.
        switch: The model's `switch_length`.
    """

    def __init__(
        self,
        budget: int,
        row_tokens: Callable[[], tuple[int, int]] | None = None,
        switch: int = 0,
    ) -> None:
        self._budget, self._row_tokens, self._switch = budget, row_tokens, switch
        self._kept = self._longest = 0
        self._warned = False

    def recomputes(self, tokens: int) -> bool:
        """Whether a row's activations do not fit into memory, and are recomputed in the backward pass."""
        return self._kept < self._longest and tokens > self._kept

    def of(self, groups: Sequence[Sequence[Segment]]) -> list[list[tuple[int, int]]]:
        """`micro_batches` of some groups; logs once if a prompt is computed more than once."""
        sizes = [(shared, shared + sum(costs)) for shared, costs in map(_costs, groups)]
        prompt, whole = max(
            (size for size in sizes if size[0]), key=lambda size: size[1], default=(0, 0)
        )
        if whole > self._budget and not self._longest:
            limits = (0, 0) if self._row_tokens is None else self._row_tokens()
            self._kept, self._longest = (max(self._budget, limit) for limit in limits)
        if whole > max(self._longest, self._budget) and not self._warned:
            self._warned = True
            _LOG.warning(
                "a group takes %d tokens and a row at most %d: its prompt of %d tokens is computed more than once in"
                " the update (raise train.token_budget, or set train.checkpointing: on)",
                *(whole, self._longest, prompt),
            )
        return micro_batches(groups, self._budget, self._longest, self._switch)


def select_segments(
    groups: Sequence[Sequence[Segment]], row: Sequence[tuple[int, int]]
) -> list[list[Segment]]:
    """Return the groups of one of `micro_batches`' rows."""
    return list(group_pairs((g, groups[g][m]) for g, m in row).values())


def _costs(group: Sequence[Segment]) -> tuple[int, list[int]]:
    """Tokens of a group's prefix, and of each member after it."""
    needed = [_cut_needed(segment) for segment in group]
    shared = _count_shared(group, [ids for ids in needed if len(ids)])
    return shared, [max(len(ids) - shared, 0) for ids in needed]


def _count_shared(segments: Sequence[Segment], alive: Sequence[Int32]) -> int:
    """Leading tokens that are computed once for all. 0 with images, which equal tokens may hide."""
    if len(alive) < 2 or any(segment.images for segment in segments):
        return 0
    return min(common(alive[0], other) for other in alive[1:])


def _cut_needed(segment: Segment) -> Int32:
    """Return the tokens up to the one that predicts the last trained token."""
    where = np.flatnonzero(segment.trained)
    return segment.ids[: where[-1]] if len(where) else segment.ids[:0]
