"""One micro-batch's loss: the policy loss, what corrects and masks it, and the KL and entropy terms (torch)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl_cli.learning.corrections import correction
from agentrl_cli.learning.kl import KL
from agentrl_cli.learning.losses import (
    Aggregation,
    LossConfig,
    LossInput,
    PolicyLoss,
    Totals,
    ratio_of,
)
from agentrl_cli.learning.masks import off_policy
from agentrl_cli.types.signals import FAR, MASKED


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
