"""Weights for the gap between the sampler's log-probabilities and the trainer's, one per token (`algo.off_policy`)."""

from __future__ import annotations

import torch
from torch import Tensor


def correction(
    name: str,
    old: Tensor,
    sampled: Tensor,
    segment: Tensor,
    cap: float,
    floor: float | None = None,
) -> Tensor:
    """[M] factor on the policy term: 1 with `none`, else π_old / π_sampled of the token, or of its whole sequence.

    tis, truncated importance sampling: at most cap and, with a floor, at least that
    (https://fengyao.notion.site/off-policy-rl). mis, masked: 0 above cap and below floor
    (https://arxiv.org/abs/2510.18855; `mis_sequence` is TRL's `sequence_mask`).
    """
    kind, _, whole = name.partition("_")
    if kind == "none":
        return torch.ones_like(old)
    difference = (old - sampled).detach()
    ratio = torch.exp(sequence_sum(difference, segment)[segment] if whole else difference)
    if kind == "tis":
        return ratio.clamp(min=floor, max=cap)
    beyond = ratio > cap if floor is None else (ratio > cap) | (ratio < floor)
    return torch.where(beyond, 0.0, ratio)


def sequence_sum(values: Tensor, segment: Tensor) -> Tensor:
    """[S] sum of each sequence."""
    count = int(segment.max()) + 1 if len(segment) else 0
    return values.new_zeros(count).index_add_(0, segment, values)
