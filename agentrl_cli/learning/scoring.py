"""Forwards without gradient that fill a step's table: log-probabilities of several models, values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from agentrl_cli.learning.compute import MicroBatch, TokenScores
from agentrl_cli.learning.dispositions import CUT
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.packing import Segment, select_segments
from agentrl_cli.learning.protocols import ModelCompute
from agentrl_cli.learning.step_table import StepTable, TokenSequence
from agentrl_cli.types import no_support

Forward = Callable[[Sequence[MicroBatch]], list[TokenScores]]


def score_policy(table: StepTable, backend: ModelCompute, *, bootstrap: bool) -> None:
    """Fill in old log-probabilities and, with a value head, values; `bootstrap`: those of truncated ends too."""
    seen, values = table.columns, backend.critic is not None
    change = _extend_truncated if values and bootstrap else None
    for sequences, scores in _score(
        table, backend, partial(backend.forward, values=values), change=change
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
    if seen.old_logp is None:
        seen.old_logp = seen.sampled_logp
    else:
        seen.old_logp = np.where(unknown, seen.old_logp, seen.sampled_logp)


def score_reference(table: StepTable, backend: ModelCompute) -> None:
    """Fill in the reference's log-probabilities."""
    seen = table.columns
    for sequences, scores in _score(table, backend, partial(backend.forward, reference=True)):
        seen.ref_logp = table.scatter(seen.ref_logp, table.rows(sequences), scores.logp)


def score_current(table: StepTable, backend: ModelCompute, bundles: Sequence[int]) -> None:
    """Fill in the present log-probabilities and entropies of some bundles."""
    seen, forward = table.columns, partial(backend.forward, entropy=True)
    for sequences, scores in _score(table, backend, forward, bundles):
        assert scores.entropy is not None
        rows = table.rows(sequences)
        seen.current_logp = table.scatter(seen.current_logp, rows, scores.logp)
        seen.entropy = table.scatter(seen.entropy, rows, scores.entropy)


def score_teacher(
    table: StepTable, backend: ModelCompute, teacher: Teacher, forward: Forward
) -> None:
    """Fill in the teacher's log-probabilities, and its states where the loss compares distributions.

    `forward` is that of its model; a teacher on a server needs none.
    """
    seen = table.columns
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
