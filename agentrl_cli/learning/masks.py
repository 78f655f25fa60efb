"""Trained tokens that count less: those far from the sampler, and those whose policy term has no gradient.

A token that is rejected leaves the mini-batch: it is in no mean and no total, as if it had not been sampled. One that
is masked stays in the totals, and its policy term is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.learning.corrections import sequence_sum
from agentrl_cli.learning.estimator_inputs import Float64
from agentrl_cli.learning.packing import Bool, Ints
from agentrl_cli.learning.step_table import StepTable
from agentrl_cli.types import Float32

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


def off_policy(
    logp: Tensor, sampled: Tensor, advantage: Tensor, segment: Tensor, threshold: float
) -> Tensor:
    """[M] bool: tokens with a negative advantage in a sequence that has become too unlikely since it was sampled.

    That is mean(log π_sampled − log π) > threshold. https://arxiv.org/abs/2512.02556 section 3.1 (DeepSeek-V3.2)
    """
    total = sequence_sum(torch.nan_to_num(sampled - logp.detach(), nan=0.0), segment)
    mean = total / torch.bincount(segment).clamp(min=1)
    return (advantage < 0) & (mean[segment] > threshold)
