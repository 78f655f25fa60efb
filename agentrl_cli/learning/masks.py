"""Trained tokens that count less: those far from what was sampled, and those whose policy term has no gradient.

A token that is rejected leaves the mini-batch: it is in no mean and no total, as if it had not been sampled. One that
is held stays in the totals, and its policy term is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.learning.estimator_inputs import Float64
from agentrl_cli.learning.step import Step
from agentrl_cli.learning.token_record import Member
from agentrl_cli.types import Float32

Bools = np.ndarray[Any, np.dtype[np.bool_]]
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


def accepted(
    rule: str, trainer: Float32, sampler: Float32, upper: float, lower: float | None = None
) -> Bools:
    """[n] bool over a sequence's tokens: those that lie within the bounds of `algo.reject`.

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


def reject(now: Step, algo: AlgoConfig) -> dict[str, float]:
    """Mark the tokens of a step that `algo.reject` accepts. Returns the shares of rejected tokens and sequences."""
    counts: list[tuple[int, int]] = []
    for member, record in now.seen.items():
        assert record.old is not None and algo.reject_upper is not None
        sampler = now.sampler(member)
        record.kept = accepted(
            algo.reject, record.old, sampler, algo.reject_upper, algo.reject_lower
        )
        counts.append((int(record.kept.sum()), len(record.kept)))
    kept, tokens = (sum(column) for column in zip(*counts, strict=True))
    touched = sum(count < size for count, size in counts)
    return {
        "reject/tokens": 1 - kept / max(tokens, 1),
        "reject/sequences": touched / max(len(counts), 1),
    }


def hold_certain(now: Step, members: Sequence[Member], share: float) -> None:
    """Hold all tokens of a mini-batch but the `share` of the highest entropy. https://arxiv.org/abs/2506.01939

    The threshold is the quantile of 1 − share, interpolated, as in TRL.
    """
    records = [now.seen[member] for member in members]
    entropies = [np.asarray(record.entropy, np.float32) for record in records]
    flat = np.concatenate(
        [one[record.valid] for one, record in zip(entropies, records, strict=True)]
    )
    threshold = float(np.quantile(flat, 1 - share)) if len(flat) else 0.0
    for record, one in zip(records, entropies, strict=True):
        record.held = one < threshold


def off_policy(
    logp: Tensor, sampled: Tensor, advantage: Tensor, segment: Tensor, threshold: float
) -> Tensor:
    """[M] bool: tokens with a negative advantage in a sequence that has become too unlikely since it was sampled.

    That is mean(log π_sampled − log π) > threshold. https://arxiv.org/abs/2512.02556 section 3.1 (DeepSeek-V3.2)
    """
    count = int(segment.max()) + 1 if len(segment) else 0
    total = logp.new_zeros(count).index_add_(
        0, segment, torch.nan_to_num(sampled - logp.detach(), nan=0.0)
    )
    mean = total / torch.bincount(segment, minlength=count).clamp(min=1)
    return (advantage < 0) & (mean[segment] > threshold)
