"""One micro-batch's loss: the policy loss, what corrects and masks it, and the KL and entropy terms (torch).

And how the configuration makes it: `loss_config`, `find_aggregation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.learning import advantages, losses
from agentrl_cli.learning.losses import (
    AGGREGATIONS,
    OTHER_NAMES,
    Aggregation,
    LossConfig,
    LossInput,
    PolicyLoss,
    Totals,
    ratio_of,
    sequence_mean,
    sequence_sum,
)
from agentrl_cli.registry import resolve
from agentrl_cli.types.tokens import FAR, MASKED


@dataclass(frozen=True, slots=True)
class Objective:
    """One micro-batch's part of the loss; `loss` and `metrics` add up over the micro-batches of a mini-batch."""

    loss: Tensor
    """Scalar with the gradient."""
    weight: Tensor
    """[M] −∂/∂logp of the policy term, corrections included, before aggregation."""
    coefficient: Tensor
    """[M] what the aggregation multiplies it with."""
    ratio: Tensor
    clipped: Tensor
    """[M] int8: 0, 1 if the ratio was clipped, MASKED or FAR."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Return shares and means over all trained tokens, under the names common elsewhere."""


def objective(
    x: LossInput, c: LossConfig, totals: Totals, policy: PolicyLoss, aggregation: Aggregation
) -> Objective:
    """Σ coefficient · (correction · policy loss + kl_coef · KL − entropy_coef · entropy)."""
    n = max(totals.tokens, 1)
    term, coefficient = policy(x, c.options), aggregation(x, totals)
    factor, metrics = _factor(x, c, n)
    policy_loss = (coefficient * term.loss * factor).sum()
    high = term.clipped & (x.advantage > 0)
    metrics |= {
        "policy_loss": policy_loss.detach(),
        "clip_ratio/high_mean": high.sum() / n,
        "clip_ratio/low_mean": (term.clipped & ~high).sum() / n,
        "approx_kl": KL["k3"](x.logp.detach(), x.old).sum() / n,
        "ratio": term.ratio.sum() / n,
    }
    loss = policy_loss
    if x.ref is not None:
        kl = KL[c.kl](x.logp, x.ref)
        if c.kl_unbiased:
            kl = kl * ratio_of(x)[0]
        metrics["kl"] = kl.detach().sum() / n
        if c.kl_coef:
            loss = loss + c.kl_coef * (coefficient * kl).sum()
    if x.entropy is not None:
        metrics["entropy"] = x.entropy.detach().sum() / n
        if c.entropy_coef:
            bonus = (
                x.entropy
                if x.entropy_masked is None
                else torch.where(x.entropy_masked, 0.0, x.entropy)
            )
            loss = loss - c.entropy_coef * (coefficient * bonus).sum()
    numbers = {name: float(value) for name, value in metrics.items()}
    clipped = torch.where(factor == 0, FAR, term.clipped.to(torch.int8))
    if x.entropy_masked is not None:
        clipped = torch.where(x.entropy_masked, MASKED, clipped)
    return Objective(loss, term.weight * factor, coefficient, term.ratio, clipped, numbers)


def _factor(x: LossInput, c: LossConfig, n: int) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] factor on the policy term: `algo.off_policy`, and 0 for the tokens that a mask takes out; and its metrics."""
    factor = correction(
        c.correction,
        x.old,
        x.old if x.sampled is None else x.sampled,
        x.segment,
        c.correction_cap,
        c.correction_floor,
    )
    metrics: dict[str, Tensor] = {}
    if x.sampled is not None:
        metrics["sampling/correction"] = factor.sum() / n
        metrics["sampling/logp_difference"] = (x.old - x.sampled).abs().sum() / n
    if c.off_policy is not None:
        sampler = x.old if x.policy is None else x.policy
        masked = off_policy(x.logp, sampler, x.advantage, x.segment, c.off_policy)
        metrics["sampling/off_policy_masked"] = masked.sum() / n
        factor = torch.where(masked, 0.0, factor)
    return (
        factor if x.entropy_masked is None else torch.where(x.entropy_masked, 0.0, factor)
    ), metrics


def correction(
    name: str,
    old: Tensor,
    sampled: Tensor,
    segment: Tensor,
    cap: float,
    floor: float | None = None,
) -> Tensor:
    """[M] factor on the policy term for the gap between sampler and trainer (`algo.off_policy`).

    1 with `none`, else π_old / π_sampled of the token, or of its whole sequence.

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


def off_policy(
    logp: Tensor, sampled: Tensor, advantage: Tensor, segment: Tensor, threshold: float
) -> Tensor:
    """[M] bool: tokens with a negative advantage in a sequence that has become too unlikely since it was sampled.

    That is mean(log π_sampled − log π) > threshold. https://arxiv.org/abs/2512.02556 section 3.1 (DeepSeek-V3.2)
    """
    mean = sequence_mean(torch.nan_to_num(sampled - logp.detach(), nan=0.0), segment)
    return (advantage < 0) & (mean[segment] > threshold)


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
"""Estimates of the KL to the reference model, one number per token (`algo.kl.estimate`)."""


def loss_config(config: LearnerSettings) -> LossConfig:
    """Return the numbers of the configured loss."""
    algo, rollout = config.algo, config.rollout
    other = rollout.truncates or rollout.async_staleness > 0  # than what is trained
    auto = "tis" if other and not algo.off_policy.bypass else "none"
    correction = auto if algo.off_policy.correction == "auto" else algo.off_policy.correction
    return LossConfig(
        options=algo.loss,
        kl=algo.kl.estimate,
        kl_coef=algo.kl.coef if algo.kl.where == "loss" else 0.0,
        kl_unbiased=algo.kl.unbiased,
        entropy_coef=algo.entropy.coef,
        correction=correction,
        correction_cap=algo.off_policy.cap,
        correction_floor=algo.off_policy.floor,
        off_policy=algo.off_policy.mask,
    )


def aggregation_name(algo: AlgoConfig) -> str:
    """What `algo.aggregation` means, by any of its names: `auto` is that of the loss's or estimator's paper."""
    if algo.aggregation != "auto":
        return OTHER_NAMES.get(algo.aggregation, algo.aggregation)
    paired = (
        losses.find(algo.loss.name).aggregation or advantages.find(algo.advantage.name).aggregation
    )
    return paired or "token_mean"


def find_aggregation(algo: AlgoConfig) -> Aggregation:
    """Return the aggregation. Raises NotFound with the nearest names."""
    found: Aggregation = resolve("aggregations", AGGREGATIONS, aggregation_name(algo))
    return found


def check(algo: AlgoConfig) -> None:
    """Raise NotFound, naming the nearest, for an unknown estimator, loss or aggregation.

    Called before a model is loaded and a run is stored.
    """
    advantages.find(algo.advantage.name)
    losses.policy_loss(algo.loss.name)
    find_aggregation(algo)
