"""Estimates of the KL to the reference model, one number per token; which of them a run uses is `algo.kl.estimate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def k1(logp: Tensor, ref: Tensor) -> Tensor:
    """log p − log p_ref: unbiased, of either sign. http://joschu.net/blog/kl-approx.html

    As a loss term its expected gradient is zero: use it in the reward.
    """
    return logp - ref


def k2(logp: Tensor, ref: Tensor) -> Tensor:
    """½ (log p − log p_ref)²: biased as an estimate, its gradient is the KL's. http://joschu.net/blog/kl-approx.html"""
    return 0.5 * (logp - ref).square()


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """p_ref/p − log(p_ref/p) − 1: unbiased, never negative. http://joschu.net/blog/kl-approx.html"""
    difference = ref - logp
    return torch.expm1(difference) - difference


def absolute(logp: Tensor, ref: Tensor) -> Tensor:
    """|log p − log p_ref|, k1's absolute form (verl's `abs`): biased, never negative; pulls a token by ±1."""
    return (logp - ref).abs()


KL: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
}
