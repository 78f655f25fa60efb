"""Weights for the gap between the sampler's log-probabilities and the trainer's, one per token (`algo.correction`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def no_correction(
    old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None
) -> Tensor:
    """[M] of ones."""
    return torch.ones_like(old)


def tis(
    old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None
) -> Tensor:
    """Truncated importance sampling: π_old / π_sampled per token, at most cap and, with a floor, at least that.

    https://fengyao.notion.site/off-policy-rl
    """
    return torch.exp((old - sampled).detach()).clamp(min=floor, max=cap)


def tis_sequence(
    old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None
) -> Tensor:
    """Return the same with the ratio of the whole sequence."""
    return torch.exp(_of_sequence(old - sampled, segment)).clamp(min=floor, max=cap)


def mis(
    old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None
) -> Tensor:
    """Masked importance sampling: the ratio per token, 0 where it is above cap or below floor.

    https://arxiv.org/abs/2510.18855
    """
    return _within(torch.exp((old - sampled).detach()), cap, floor)


def mis_sequence(
    old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None
) -> Tensor:
    """Return the same with the ratio of the whole sequence (TRL's `sequence_mask`)."""
    return _within(torch.exp(_of_sequence(old - sampled, segment)), cap, floor)


def _within(ratio: Tensor, cap: float, floor: float | None) -> Tensor:
    beyond = ratio > cap if floor is None else (ratio > cap) | (ratio < floor)
    return torch.where(beyond, 0.0, ratio)


def _of_sequence(difference: Tensor, segment: Tensor) -> Tensor:
    """[M] sum over the token's sequence."""
    count = int(segment.max()) + 1 if len(segment) else 0
    return difference.detach().new_zeros(count).index_add_(0, segment, difference.detach())[segment]


CORRECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "none": no_correction,
    "tis": tis,
    "tis_sequence": tis_sequence,
    "mis": mis,
    "mis_sequence": mis_sequence,
}
