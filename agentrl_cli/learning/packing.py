"""Groups of episodes in one row of tokens, without padding and with a group's prefix computed once.

`pack` lays groups of episodes into one row: the common prefix of a group's episodes (their prompt, and beyond it as far
as they agree) is in it once. Not here: the forward pass over the row (forward.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.learning.attention import Block
from agentrl_cli.types import Branch, Episode, Int32, Support, no_support

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


def common_prefix(arrays: Sequence[Int32]) -> int:
    """Return how many leading ids all arrays share."""
    if not arrays:
        return 0
    n = min(len(a) for a in arrays)
    stack = np.stack([np.asarray(a[:n]) for a in arrays])
    same = (stack == stack[0]).all(0)
    return n if same.all() else int(same.argmin())


def pack(groups: Sequence[Sequence[Segment]]) -> Packed:
    """Return one row of groups of episodes, the prefix of each group once.

    Tokens behind the last trained one of an episode, and that one itself, predict nothing: they are left out.
    """
    row = _Row()
    for group in groups:
        row.add(group)
    return row.packed()


class _Row:
    """A row being filled."""

    def __init__(self) -> None:
        self.ids: list[NDArray[Any]] = []
        self.positions: list[Ints] = []
        self.blocks: list[Block] = []
        self.facts: list[tuple[NDArray[Any], NDArray[Any]]] = []
        """Rows and ids of the trained tokens of each episode."""
        self.images: list[tuple[bytes, ...]] = []
        self.support: list[Support] = []
        self.size = 0

    def _put(self, ids: NDArray[Any], first: int) -> None:
        self.ids.append(ids)
        self.positions.append(np.arange(first, first + len(ids), dtype=np.int64))
        self.size += len(ids)

    def add(self, segments: Sequence[Segment]) -> None:
        """Add a block: the common prefix of the needed tokens, then each episode's rest."""
        for segment in segments:
            if len(segment.trained) != len(segment.ids):
                raise ValueError("ids and trained differ in length")
            if len(segment.trained) and segment.trained[0]:
                raise ValueError(
                    "the first token of an episode has no log-probability: nothing precedes it"
                )
        wanted = [np.flatnonzero(s.trained) for s in segments]
        needed = [_cut_needed(s) for s in segments]
        alive = [ids for ids in needed if len(ids)]
        shared = _count_shared(segments, alive)
        start = self.size
        if shared:
            self._put(alive[0][:shared], 0)
        own = self.size
        ends: list[int] = []
        for segment, where, ids in zip(segments, wanted, needed, strict=True):
            before = where - 1
            self.facts.append(
                (
                    np.where(before < shared, start + before, self.size + before - shared),
                    segment.ids[where],
                )
            )
            self.support.append(
                no_support(len(where)) if segment.support is None else segment.support[where]
            )
            if len(ids):
                self._put(ids[shared:], shared)
                if len(ids) > shared:
                    self.images.append(segment.images)
                ends.append(self.size)
        if self.size > start:
            self.blocks.append(Block(start, own, tuple(ends)))

    def packed(self) -> Packed:
        def join(parts: list[NDArray[Any]]) -> Ints:
            return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

        support = np.concatenate([no_support(0), *self.support])
        return Packed(
            join(self.ids),
            join(self.positions),
            tuple(self.blocks),
            join([rows for rows, _ in self.facts]),
            join([targets for _, targets in self.facts]),
            join([np.full(len(rows), i) for i, (rows, _) in enumerate(self.facts)]),
            support if any(ids is not None for ids in support) else None,
            tuple(self.images) if any(self.images) else (),
        )


def micro_batches(
    groups: Sequence[Sequence[Segment]], budget: int, longest: int | None = None
) -> list[list[tuple[int, int]]]:
    """Split groups into rows of at most `budget` packed tokens: lists of (group, member), each member once, in order.

    A group larger than the budget is a row of its own up to `longest` tokens, so that its prefix is computed once;
    beyond that it is split, and its prefix computed in each of its rows. An episode larger than the budget is a row of
    its own. `select_segments` makes a row's groups.
    """
    out: list[list[tuple[int, int]]] = []
    used = 0
    for g, group in enumerate(groups):
        shared, costs = _costs(group)
        most = budget if not shared or shared + sum(costs) <= budget else max(budget, longest or 0)
        if not out or used + shared + sum(costs) > budget:
            out.append([])
            used = 0
        used += shared
        for m, cost in enumerate(costs):
            if out[-1] and used + cost > most:
                out.append([])
                used = shared
            out[-1].append((g, m))
            used += cost
    return [row for row in out if row]


class Rows:
    """Cuts groups into micro-batches, in which a group's prompt is computed once as far as memory allows.

    Args:
        budget: Tokens of a micro-batch.
        row_tokens: Returns how many tokens of a group the memory holds, if one is larger; None: the budget.
    """

    def __init__(self, budget: int, row_tokens: Callable[[], int] | None = None) -> None:
        self._budget, self._row_tokens = budget, row_tokens
        self._longest, self._warned = 0, False

    def of(self, groups: Sequence[Sequence[Segment]]) -> list[list[tuple[int, int]]]:
        """`micro_batches` of some groups; logs once if a prompt is computed more than once."""
        sizes = [(shared, shared + sum(costs)) for shared, costs in map(_costs, groups)]
        prompt, whole = max(
            (size for size in sizes if size[0]), key=lambda size: size[1], default=(0, 0)
        )
        if whole > self._budget and not self._longest:
            self._longest = max(
                self._budget, self._row_tokens() if self._row_tokens is not None else 0
            )
        if whole > max(self._longest, self._budget) and not self._warned:
            self._warned = True
            _LOG.warning(
                "a group takes %d tokens and a row at most %d: its prompt of %d tokens is computed more than once in"
                " the update (raise train.token_budget, or set train.checkpointing: on)",
                *(whole, self._longest, prompt),
            )
        return micro_batches(groups, self._budget, self._longest)


def select_segments(
    groups: Sequence[Sequence[Segment]], row: Sequence[tuple[int, int]]
) -> list[list[Segment]]:
    """Return the groups of one of `micro_batches`' rows."""
    members: dict[int, list[Segment]] = {}
    for g, m in row:
        members.setdefault(g, []).append(groups[g][m])
    return list(members.values())


def _costs(group: Sequence[Segment]) -> tuple[int, list[int]]:
    """Tokens of a group's prefix, and of each member after it."""
    needed = [_cut_needed(segment) for segment in group]
    shared = _count_shared(group, [ids for ids in needed if len(ids)])
    return shared, [max(len(ids) - shared, 0) for ids in needed]


def _count_shared(segments: Sequence[Segment], alive: Sequence[Int32]) -> int:
    """Leading tokens that are computed once for all. 0 with images, which equal tokens may hide."""
    return (
        common_prefix(alive)
        if len(alive) > 1 and not any(segment.images for segment in segments)
        else 0
    )


def _cut_needed(segment: Segment) -> Int32:
    """Return the tokens up to the one that predicts the last trained token."""
    where = np.flatnonzero(segment.trained)
    return segment.ids[: where[-1]] if len(where) else segment.ids[:0]
