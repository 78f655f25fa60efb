"""The trained tokens of one training step as one table: a row a token, a typed column for each number.

Rows follow the episodes, and within an episode its tokens; `offsets` says where each episode begins. A token sequence
is an episode, or a branch of one, and knows the rows of the tokens that it trains: a token that several branches share
is a row of the first. Sequences that begin alike lie in one bundle, so that their prefix is computed once; a group
is one bundle unless agents in it began several contexts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.learning.estimator_inputs import Float64
from agentrl_cli.learning.losses import Totals
from agentrl_cli.learning.packing import Bool, Ints, Segment, segments_of
from agentrl_cli.types import Branch, Episode, Float32, TrainSignals
from agentrl_cli.types.tokens import REJECTED


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A sequence of a step, as the forward computes it."""

    episode_number: int
    """Number of its episode in the step."""
    episode: Episode
    branch: Branch
    segment: Segment
    rows: Ints
    """[n] rows of the tokens that it trains."""

    @property
    def last(self) -> bool:
        """Whether it ends with the episode's last turn: a limit that cut the episode cut this sequence."""
        return not self.episode.turns or self.branch.turns[-1] == len(self.episode.turns) - 1


@dataclass(slots=True)
class TokenColumns:
    """Numbers of N trained tokens, [N] each. None: not computed."""

    sampled_logp: Float32
    """Log-probability under the distribution that was sampled from, NaN if unknown."""
    sampler_logp: Float32
    """Log-probability that the sampler has for what the trainer computes: among the tokens left, if stored."""
    advantage: Float32
    old_logp: Float32 | None = None
    """Log-probability before the first optimizer step."""
    ref_logp: Float32 | None = None
    current_logp: Float32 | None = None
    """Log-probability before this optimizer step, where the loss selects tokens by it."""
    entropy: Float32 | None = None
    """Entropy before this optimizer step, if tokens are selected by it."""
    selected: Bool | None = None
    """Tokens that the loss selected over the whole mini-batch."""
    accepted: Bool | None = None
    """False: rejected; no sequence trains the token any more."""
    entropy_masked: Bool | None = None
    """True: the policy term has no gradient."""
    teacher_logp: Float32 | None = None
    teacher_states: NDArray[Any] | None = None
    """[N, D] the teacher's hidden states that predict the tokens, where the loss needs its distribution."""
    reward_advantage: Float32 | None = None
    """The advantage from the reward alone, beside a teacher's."""
    value: Float32 | None = None
    returns: Float32 | None = None
    ratio: Float32 | None = None
    clipped: NDArray[np.int8] | None = None
    weight: Float32 | None = None

    @property
    def valid(self) -> Bool:
        """[N] tokens that were not rejected."""
        return np.ones(len(self.advantage), np.bool_) if self.accepted is None else self.accepted

    def loss_inputs(self, rows: Ints) -> TokenColumns:
        """Return the columns of some rows that a loss may need; no `old_logp` where none is known yet."""
        names = (
            *("sampled_logp", "sampler_logp", "advantage", "old_logp", "ref_logp", "selected"),
            *("entropy_masked", "teacher_states", "value", "returns"),
        )
        columns = {name: getattr(self, name) for name in names}
        found = {name: one[rows] for name, one in columns.items() if one is not None}
        if "old_logp" in found and np.isnan(found["old_logp"]).all():
            del found["old_logp"]
        return TokenColumns(**found)


@dataclass(frozen=True, slots=True)
class TokenResults:
    """Numbers of the objective for a micro-batch's trained tokens, [M] each."""

    ratio: NDArray[Any]
    clipped: NDArray[Any]
    weight: NDArray[Any]
    old_logp: NDArray[Any]


@dataclass(slots=True)
class StepTable:
    """The groups of one update as bundles of sequences, and the columns of their tokens."""

    number: int
    episodes: list[Episode]
    offsets: Ints
    """[E + 1] row at which each episode begins, and the number of rows."""
    sequences: list[TokenSequence]
    bundles: list[list[int]]
    """The sequences of each bundle."""
    groups: list[list[int]]
    """The bundles of each group."""
    columns: TokenColumns
    bootstrap: Float64
    """[E] value of the state that a truncated episode was left in; 0 if it ended."""

    @classmethod
    def of(cls, number: int, groups: Sequence[Sequence[Episode]]) -> StepTable:
        """Return the table of groups of episodes; there is at least one episode."""
        episodes = [episode for group in groups for episode in group]
        offsets = np.cumsum([0, *(episode.trained_tokens for episode in episodes)], dtype=np.int64)
        sequences: list[TokenSequence] = []
        bundles: list[list[int]] = []
        by_group: list[list[int]] = []
        first = 0
        for group in groups:
            found = _bundle(group, first, offsets)
            by_group.append(list(range(len(bundles), len(bundles) + len(found))))
            for bundle in found:
                bundles.append(list(range(len(sequences), len(sequences) + len(bundle))))
                sequences += bundle
            first += len(group)
        empty = np.zeros(len(episodes))
        return cls(
            number, episodes, offsets, sequences, bundles, by_group, _columns_of(episodes), empty
        )

    def segments(self, bundles: Iterable[int]) -> list[list[Segment]]:
        """Return the segments of some bundles."""
        return [[self.sequences[s].segment for s in self.bundles[b]] for b in bundles]

    def rows(self, sequences: Iterable[int]) -> Ints:
        """Return the rows of some sequences, one after another."""
        return np.concatenate([self.sequences[s].rows for s in sequences])

    def by_episode(self, column: NDArray[Any]) -> list[NDArray[Any]]:
        """Split a column into one array for each episode."""
        return np.split(column, self.offsets[1:-1])

    def episode_sizes(self) -> list[int] | None:
        """For each episode the trained tokens that were not rejected; None if each is one sequence."""
        if len(self.sequences) == len(self.episodes):
            return None
        return [int(part.sum()) for part in self.by_episode(self.columns.valid)]

    def totals(self, bundles: Iterable[int], max_tokens: int) -> Totals:
        """Return the totals of a mini-batch."""
        found = [self.sequences[s] for b in bundles for s in self.bundles[b]]
        episodes = {one.episode_number for one in found}
        return Totals(sum(len(one.rows) for one in found), len(found), max_tokens, len(episodes))

    def reject(self, accepted: Sequence[Bool]) -> None:
        """Let each sequence train those of its tokens that are accepted; one without any leaves its bundle."""
        seen = self.columns
        seen.weight = np.zeros_like(seen.advantage)
        for number, (one, kept) in enumerate(zip(self.sequences, accepted, strict=True)):
            seen.accepted = self.scatter(seen.accepted, one.rows, kept)
            trained = one.segment.trained.copy()
            trained[trained] = kept
            segment = replace(one.segment, trained=trained)
            self.sequences[number] = replace(one, segment=segment, rows=one.rows[kept])
        for bundle in self.bundles:
            bundle[:] = [s for s in bundle if len(self.sequences[s].rows)]

    def scatter(
        self, column: NDArray[Any] | None, rows: Ints, values: NDArray[Any]
    ) -> NDArray[Any]:
        """Write the values of some rows into a column, which is made if it is None: NaN, 0 or False elsewhere."""
        if column is None:
            fill = np.nan if np.issubdtype(values.dtype, np.floating) else 0
            column = np.full((int(self.offsets[-1]), *values.shape[1:]), fill, values.dtype)
        column[rows] = values
        return column

    def record(self, rows: Sequence[Ints], results: Sequence[TokenResults]) -> None:
        """Write the objective's numbers of each micro-batch, and the old log-probabilities that it used."""
        seen = self.columns
        for where, found in zip(rows, results, strict=True):
            seen.ratio = self.scatter(seen.ratio, where, found.ratio)
            seen.clipped = self.scatter(seen.clipped, where, found.clipped)
            seen.weight = self.scatter(seen.weight, where, found.weight)
            seen.old_logp = self.scatter(seen.old_logp, where, found.old_logp)

    def signals(self) -> Iterator[tuple[Episode, TrainSignals]]:
        """Yield each episode with [n] arrays over all of its tokens, NaN where a token was not trained."""
        seen = self.columns
        clipped = 0 if seen.clipped is None else seen.clipped
        clipped = np.where(seen.valid, clipped, REJECTED).astype(np.int8)
        always = {
            "advantage": seen.advantage,
            "logp_train": seen.old_logp,
            "ratio": seen.ratio,
            "weight": seen.weight,
        }
        optional = {
            "logp_ref": seen.ref_logp,
            "value": seen.value,
            "returns": seen.returns,
            "logp_teacher": seen.teacher_logp,
            "reward_advantage": seen.reward_advantage,
        }
        columns = always | {name: one for name, one in optional.items() if one is not None}
        for number, episode in enumerate(self.episodes):
            rows, mask = slice(*self.offsets[number : number + 2]), episode.tokens.trained_mask
            found: dict[str, Any] = {"clipped": np.zeros(len(mask), np.int8)}
            found["clipped"][mask] = clipped[rows]
            for name, column in columns.items():
                found[name] = np.full(len(mask), np.nan, np.float32)
                if column is not None:
                    found[name][mask] = column[rows]
            yield episode, TrainSignals(**found)


def sampling_gap(trainer: Float32, sampler: Float32) -> dict[str, float]:
    """Return how far the sampler's log-probabilities lie from the trainer's: rounding, or weights that were older.

    `sampling/kl` estimates KL(sampler || trainer) per token, by k3 with the ratio trainer/sampler
    (http://joschu.net/blog/kl-approx.html). Tokens whose sampler did not report the log-probability do not count;
    `sampling/unknown` is their share, if there are any.
    """
    if not len(trainer):
        return {}
    finite = np.isfinite(sampler)
    unknown = {} if finite.all() else {"sampling/unknown": float(1 - finite.mean())}
    if not finite.any():
        return unknown
    change = trainer[finite].astype(np.float64) - sampler[finite].astype(np.float64)
    return unknown | {
        "sampling/sampling_logp_difference/mean": float(np.abs(change).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(change).max()),
        "sampling/kl": float((np.expm1(change.clip(max=50.0)) - change).mean()),
    }


def _columns_of(episodes: Sequence[Episode]) -> TokenColumns:
    """Return the columns that are known from sampling; all advantages are 0."""
    tokens = [(episode.tokens, episode.tokens.trained_mask) for episode in episodes]
    sampled = np.concatenate([one.logp_sampled[mask] for one, mask in tokens])
    sampler = [
        (one.logp_policy if one.support is None else one.logp_sampled)[mask] for one, mask in tokens
    ]
    return TokenColumns(sampled, np.concatenate(sampler), np.zeros(len(sampled), np.float32))


def _bundle(group: Sequence[Episode], first: int, offsets: Ints) -> list[list[TokenSequence]]:
    """Group sequences by the turn that they begin with; one bundle if all episodes of the group are linear."""
    found: dict[bytes, list[TokenSequence]] = {}
    alike = all(episode.linear for episode in group)
    for number, episode in enumerate(group, first):
        row_of = offsets[number] + np.cumsum(episode.tokens.trained_mask) - 1
        for branch, segment in segments_of(episode):
            root = episode.turns[branch.turns[0]] if branch.turns and not alike else None
            key = b"" if root is None else episode.tokens.ids[root.start : root.end].tobytes()
            rows = row_of[branch.positions[branch.trained]]
            one = TokenSequence(number, episode, branch, segment, rows)
            found.setdefault(key, []).append(one)
    return list(found.values())
