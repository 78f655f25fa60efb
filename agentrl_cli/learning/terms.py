"""What stands beside the policy loss: KL estimates, sampler corrections, the value loss and coefficient controllers.

All per token and packed, as in losses.py. Not here: which of them a run uses.
"""

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


KL: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def no_correction(old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None) -> Tensor:
    """[M] of ones."""
    return torch.ones_like(old)


def tis(old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None) -> Tensor:
    """Truncated importance sampling: π_old / π_sampled per token, at most cap and, where there is a floor, at least it.

    https://fengyao.notion.site/off-policy-rl
    """
    return torch.exp((old - sampled).detach()).clamp(min=floor, max=cap)


def tis_sequence(old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None) -> Tensor:
    """The same with the ratio of the whole sequence."""
    return torch.exp(_of_sequence(old - sampled, segment)).clamp(min=floor, max=cap)


def mis(old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None) -> Tensor:
    """Masked importance sampling: the ratio per token, 0 where it is above cap or below floor.

    https://arxiv.org/abs/2510.18855
    """
    return _within(torch.exp((old - sampled).detach()), cap, floor)


def mis_sequence(old: Tensor, sampled: Tensor, segment: Tensor, cap: float, floor: float | None = None) -> Tensor:
    """The same with the ratio of the whole sequence (TRL's `sequence_mask`)."""
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


def value_loss(value: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """[M] ½ max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²). https://arxiv.org/abs/2005.12729"""
    loss = (value - returns).square()
    if clip is not None:
        held = old + (value - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (held - returns).square())
    return 0.5 * loss


def value_held(value: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """[M] bool: the held value's loss is the larger one, so it counts and passes no gradient (verl's vf_clipfrac)."""
    if clip is None:
        return torch.zeros_like(value, dtype=torch.bool)
    held = old + (value - old).clamp(-clip, clip)
    return (held - returns).square() > (value - returns).square()


def explained_variance(value: Tensor, returns: Tensor) -> float:
    """1 − Var(R − V) / Var(R): 1 is perfect, 0 no better than a constant; NaN where the returns do not vary."""
    spread = returns.var(correction=0)
    return float(1 - (returns - value).var(correction=0) / spread) if float(spread) > 0 else float("nan")


def adapt_kl_coef(coef: float, kl: float, target: float, tokens: int, horizon: int = 10_000) -> float:
    """The next KL coefficient: up where KL is above its target. https://arxiv.org/abs/1909.08593

    At most by a fifth in one step, however many tokens it had: a step longer than the horizon would overshoot, and
    from five times its length on make the coefficient negative.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(tokens / horizon, 1.0))


def adapt_entropy_coef(coef: float, entropy: float, target: float, delta: float = 0.005, top: float = 1.0) -> float:
    """The next entropy coefficient: up by delta while entropy is below its target, else down; in [0, top].

    https://arxiv.org/abs/2505.22312 (Skywork-OR1). The bonus is meant to be off above the target.
    """
    return min(max(coef + (delta if entropy < target else -delta), 0.0), top)
