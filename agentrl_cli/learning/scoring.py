"""What fills a step's table besides the update: forwards without gradient, and the tokens that count less.

A token that is rejected leaves the mini-batch: it is in no mean and no total, as if it had not been sampled. One that
is masked stays in the totals, and its policy term is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log

import numpy as np

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.learning.compute import MicroBatch, TokenScores
from agentrl_cli.learning.dispositions import CUT
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.estimator_inputs import Float64
from agentrl_cli.learning.packing import Bool, Ints, Segment, select_segments
from agentrl_cli.learning.protocols import ModelCompute
from agentrl_cli.learning.step_table import StepTable, TokenSequence
from agentrl_cli.types import Float32, no_support

Forward = Callable[[Sequence[MicroBatch]], list[TokenScores]]


def score_policy(
    table: StepTable,
    backend: ModelCompute,
    *,
    bootstrap: bool,
    bundles: Sequence[int] | None = None,
) -> None:
    """Fill in old log-probabilities and, with a value head, values; `bootstrap`: those of truncated ends too.

    `bundles`: only those of these bundles; None: of all.
    """
    seen, values = table.columns, backend.critic is not None
    change = _extend_truncated if values and bootstrap else None
    for sequences, scores in _score(
        table, backend, partial(backend.forward, values=values), bundles, change
    ):
        rows, extended = table.rows(sequences), np.zeros(len(scores.logp), np.bool_)
        at = 0
        for one in (table.sequences[s] for s in sequences):
            at += len(one.rows)
            if change is not None and _is_truncated(one) and scores.value is not None:
                table.bootstrap[one.episode_number], extended[at] = scores.value[at], True
                at += 1
        seen.old_logp = table.scatter(seen.old_logp, rows, scores.logp[~extended])
        if scores.value is not None:
            seen.value = table.scatter(seen.value, rows, scores.value[~extended])


def score_sampled(table: StepTable, backend: ModelCompute, *, bootstrap: bool) -> None:
    """Fill in the sampler's log-probabilities as the old ones; where one is unknown, the trainer's."""
    seen, unknown = table.columns, np.isnan(table.columns.sampled_logp)
    if seen.old_logp is None and (backend.critic is not None or unknown.any()):
        score_policy(table, backend, bootstrap=bootstrap)
    own = seen.sampled_logp if seen.old_logp is None else seen.old_logp
    seen.old_logp = np.where(unknown, own, seen.sampled_logp)


def score_reference(table: StepTable, backend: ModelCompute) -> None:
    """Fill in the reference's log-probabilities."""
    seen = table.columns
    for sequences, scores in _score(table, backend, partial(backend.forward, under="reference")):
        seen.ref_logp = table.scatter(seen.ref_logp, table.rows(sequences), scores.logp)


def score_current(table: StepTable, backend: ModelCompute, bundles: Sequence[int]) -> None:
    """Fill in the present log-probabilities and entropies of some bundles."""
    seen, forward = table.columns, partial(backend.forward, entropy=True)
    for sequences, scores in _score(table, backend, forward, bundles):
        assert scores.entropy is not None
        rows = table.rows(sequences)
        seen.current_logp = table.scatter(seen.current_logp, rows, scores.logp)
        seen.entropy = table.scatter(seen.entropy, rows, scores.entropy)


def score_teacher(table: StepTable, backend: ModelCompute, teacher: Teacher) -> None:
    """Fill in the teacher's log-probabilities, and its states where the loss compares distributions."""
    seen, forward = table.columns, partial(backend.forward, under="teacher")
    if teacher.server is not None:
        found = np.concatenate(teacher.server([teacher.sees(one) for one in table.sequences]))
        rows = table.rows(range(len(table.sequences)))
        seen.teacher_logp = table.scatter(None, rows, found)
        return
    for sequences, scores in _score(table, backend, forward, change=teacher.sees):
        rows = table.rows(sequences)
        seen.teacher_logp = table.scatter(seen.teacher_logp, rows, scores.logp)
        if scores.states is not None:
            seen.teacher_states = table.scatter(seen.teacher_states, rows, scores.states)


def _score(
    table: StepTable,
    backend: ModelCompute,
    forward: Forward,
    bundles: Sequence[int] | None = None,
    change: Callable[[TokenSequence], Segment] | None = None,
) -> Iterator[tuple[list[int], TokenScores]]:
    """Yield each micro-batch's sequences and scores. `change` returns the segment to compute instead of one."""
    bundles = range(len(table.bundles)) if bundles is None else bundles
    segments = table.segments(bundles)
    if change is not None:
        segments = [[change(table.sequences[s]) for s in table.bundles[b]] for b in bundles]
    rows = backend.split(segments)
    scores = forward([MicroBatch(select_segments(segments, row)) for row in rows])
    for row, one in zip(rows, scores, strict=True):
        yield [table.bundles[bundles[b]][m] for b, m in row], one


def _is_truncated(sequence: TokenSequence) -> bool:
    return sequence.episode.outcome in CUT and sequence.last


def _extend_truncated(sequence: TokenSequence) -> Segment:
    """Return a truncated sequence with one more position, whose value is that of the state it was left in."""
    segment = sequence.segment
    if not _is_truncated(sequence):
        return segment
    support = None if segment.support is None else np.append(segment.support, no_support(1))
    trained, ids = np.append(segment.trained, True), np.append(segment.ids, segment.ids[-1:])
    return replace(segment, ids=ids, trained=trained, support=support)


_MAX_LOG_RATIO = 20.0

_DIVERGENCE: Mapping[str, Callable[[Float64], Float64]] = {
    "k1": lambda change: -change,
    "k2": lambda change: change**2 / 2,
    "k3": lambda change: np.expm1(change) - change,
}
"""Estimates of KL(sampler || trainer) from log p_trainer − log p_sampler. http://joschu.net/blog/kl-approx.html"""

_OVER: Mapping[str, Callable[[Float64], Float64]] = {
    "seq_sum": np.sum,
    "seq_mean": np.mean,
    "seq_max": np.max,
}


def within_bounds(
    rule: str, trainer: Float32, sampler: Float32, upper: float, lower: float | None = None
) -> Bool:
    """Return [n] bool over a sequence's tokens: those that lie within the bounds of `algo.off_policy.reject`.

    With k1 the bounds are ratios π_sampler / π_trainer: of each token, of the sequence (sum), or its geometric mean
    (mean); `lower` is 1 / `upper` if not given. With k2 and k3 `upper` bounds the divergence in nats. A token whose
    sampler's log-probability is unknown (NaN) counts as one without a gap. As verl's `rollout_rs`;
    https://richardli.xyz/rl-collapse
    """
    level, _, estimate = rule.rpartition("_")
    change = np.nan_to_num(np.asarray(trainer, np.float64) - sampler, nan=0.0).clip(
        -_MAX_LOG_RATIO, _MAX_LOG_RATIO
    )
    if not len(change):
        return np.zeros(0, np.bool_)
    value = _DIVERGENCE[estimate](change)
    if level != "token":
        value = np.broadcast_to(_OVER[level](value), change.shape)
    if estimate != "k1":
        return value <= upper
    return (value >= log(1 / upper if lower is None else lower)) & (value <= log(upper))


def reject_far(table: StepTable, algo: AlgoConfig) -> dict[str, float]:
    """Reject what `algo.off_policy.reject` does not accept. Returns the shares of rejected tokens and sequences."""
    far = algo.off_policy
    seen, rule, upper, lower = table.columns, far.reject, far.reject_upper, far.reject_lower
    assert seen.old_logp is not None and upper is not None
    accepted = [
        within_bounds(rule, seen.old_logp[rows], seen.sampler_logp[rows], upper, lower)
        for rows in (one.rows for one in table.sequences)
    ]
    table.reject(accepted)
    return {
        "reject/tokens": 1 - int(seen.valid.sum()) / max(len(seen.valid), 1),
        "reject/sequences": sum(not kept.all() for kept in accepted) / max(len(accepted), 1),
    }


def mask_certain(table: StepTable, rows: Ints, share: float) -> None:
    """Mask those rows of a mini-batch that are not in the `share` of the highest entropy.

    The threshold is the quantile of 1 − share, interpolated, as in TRL. https://arxiv.org/abs/2506.01939
    """
    seen = table.columns
    assert seen.entropy is not None
    entropy = np.asarray(seen.entropy[rows], np.float32)
    threshold = float(np.quantile(entropy, 1 - share)) if len(rows) else 0.0
    seen.entropy_masked = table.scatter(seen.entropy_masked, rows, entropy < threshold)
