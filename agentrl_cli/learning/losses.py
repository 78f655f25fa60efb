"""Policy losses over packed tokens: one number and one effective gradient weight per token (torch).

A policy loss is a function of one batch of trained tokens, laid end to end without padding, and returns per token
the loss, the weight −∂loss/∂log p written down by hand (what replay shows: zero where clipped), the ratio and
whether a bound was hit. An aggregation gives each token's coefficient from *global* totals, so that gradients of
micro-batches add up to that of the whole batch. objective.py joins them with the KL and entropy terms.

What else is known of each loss is its record in config/losses.py. Not here: advantages, and forward passes.
Notation: M tokens, S sequences; `ratio` = π(token) / π_old(token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from agentrl_cli.config.choice import Options
from agentrl_cli.config.losses import (
    LOSSES,
    Clip,
    ClipCov,
    CustomLoss,
    DualClip,
    Gate,
    KlCov,
    Loss,
    TrustRegion,
)
from agentrl_cli.registry import resolve
from agentrl_cli.types.old_names import OldAttribute

_MAX_LOG_RATIO = 20.0
"""Beyond e^20 a ratio is held and passes no gradient: one absurd token must not turn the step into NaN."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The policy loss's options, and the terms beside it."""

    options: Options
    """Those of the policy loss, which is also named there."""
    kl: str = "k3"
    kl_coef: float = 0.0
    kl_unbiased: bool = False
    """Weigh the KL term with the ratio: its gradient is then that of the divergence. https://arxiv.org/abs/2512.02556"""
    entropy_coef: float = 0.0
    correction: str = "none"
    """Correction of the gap between the sampler's and the trainer's log-probabilities."""
    correction_cap: float = 2.0
    correction_floor: float | None = None
    off_policy: float | None = None
    """Threshold of objective.off_policy."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """The trained tokens of one micro-batch, all tensors [M] on one device."""

    logp: Tensor
    """Log-probability now; the only one with a gradient besides `entropy`."""
    old: Tensor
    """Log-probability under the trainer's weights before the first optimizer step."""
    advantage: Tensor
    segment: Tensor
    """int64, number 0..S-1 of the sequence that the token belongs to."""
    entropy: Tensor | None = None
    ref: Tensor | None = None
    """Log-probability under the reference model."""
    sampled: Tensor | None = None
    """Log-probability under the distribution that was sampled from."""
    selected: Tensor | None = None
    """bool, tokens that the loss selected by `select` over the whole mini-batch; None: selected from this one."""
    episode_tokens: Tensor | None = None
    """[S] trained tokens of the episode that the sequence belongs to, where an episode has several sequences."""
    policy: Tensor | None = None
    """Log-probability under the sampler's weights, of the same distribution as `logp`, where a mask compares it."""
    entropy_masked: Tensor | None = None
    """bool, tokens whose policy term and entropy bonus are 0, and which count in the totals."""

    marked = OldAttribute("selected")
    kept: ClassVar[None] = None
    """Before 0.1 the tokens that were not rejected. No other reaches a loss, so it was always None there."""
    held = OldAttribute("entropy_masked")


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of the whole mini-batch, of which a LossInput may be a part."""

    tokens: int
    sequences: int
    max_tokens: int
    """The constant that `seq_mean_norm` divides by: the most tokens an episode may train on."""
    episodes: int | None = None
    """Where it differs from `sequences`."""

    @classmethod
    def of(cls, segment: Tensor, max_tokens: int) -> Totals:
        """Return the totals of a batch that is not split."""
        return cls(len(segment), int((torch.bincount(segment) > 0).sum()), max_tokens)


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    """All [M]. `loss` carries the gradient; the others are detached."""

    loss: Tensor
    weight: Tensor
    """−∂loss/∂logp of the same token."""
    ratio: Tensor
    clipped: Tensor
    """bool: a bound was hit on the side that changes the update."""


PolicyLoss = Callable[[LossInput, Any], PolicyTerm]
Aggregation = Callable[[LossInput, Totals], Tensor]


def ratio_of(x: LossInput) -> tuple[Tensor, Tensor]:
    """(ratio with gradient, detached d ratio / d logp)."""
    difference = x.logp - x.old
    ratio = torch.exp(difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    return ratio, (ratio * (difference.abs() <= _MAX_LOG_RATIO)).detach()


def _clip(ratio: Tensor, slope: Tensor, advantage: Tensor, c: DualClip) -> PolicyTerm:
    """PPO's pessimistic minimum for a ratio whose derivative by log p is `slope`."""
    bounded = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
    loss = torch.maximum(-ratio * advantage, -bounded * advantage)
    held = ratio.detach()
    clipped = _is_bound(held, advantage, c)
    if c.clip_dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -c.clip_dual * advantage), loss)
        clipped = clipped | ((advantage < 0) & (held > c.clip_dual))
    weight = torch.where(clipped, 0.0, slope * advantage)
    return PolicyTerm(loss, weight, held, clipped)


def _is_bound(ratio: Tensor, advantage: Tensor, c: Clip) -> Tensor:
    """[M] bool: a bound is reached on the side that changes the update."""
    return ((advantage > 0) & (ratio > 1 + c.clip_high)) | (
        (advantage < 0) & (ratio < 1 - c.clip_low)
    )


def ppo_clip(x: LossInput, c: DualClip) -> PolicyTerm:
    """−min(ratio·A, clip(ratio, 1−low, 1+high)·A). https://arxiv.org/abs/1707.06347 eq. 7.

    Two bounds: https://arxiv.org/abs/2503.14476 (DAPO). With clip_dual, bounded above where A < 0:
    https://arxiv.org/abs/1912.09729.
    """
    ratio, slope = ratio_of(x)
    return _clip(ratio, slope, x.advantage, c)


def gspo(x: LossInput, c: DualClip) -> PolicyTerm:
    """PPO's clip on the sequence's geometric-mean ratio. https://arxiv.org/abs/2507.18071

    In the token form (the sequence ratio held, each token's log p carrying its gradient), whose `seq_mean` gradient
    is that of the sequence form.
    """
    mean = sequence_mean(x.logp.detach() - x.old, x.segment)
    difference = mean[x.segment].clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = torch.exp(difference + x.logp - x.logp.detach())
    return _clip(ratio, ratio.detach(), x.advantage, c)


def geo_mean(x: LossInput, c: Clip) -> PolicyTerm:
    """GMPO: the geometric mean of a sequence's ratios, each of them clipped before. https://arxiv.org/abs/2507.20673

    The bounds are of log ratios: e^−low to e^high. In the token form, as in `gspo`: with `seq_mean` it is the sequence
    form, −A · (Π clipped ratios)^(1/n), where A is one number per sequence or the mean over its tokens, as in verl.
    """
    difference = (x.logp - x.old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    bounded = difference.clamp(-c.clip_low, c.clip_high)
    sign = x.advantage.sign()
    # With an advantage of 0 nothing is kept: the token counts as a ratio of 1 (sign 0), as in verl.
    kept = sign * torch.minimum(sign * difference, sign * bounded)
    mean = sequence_mean(kept.detach(), x.segment)[x.segment]
    advantage = sequence_mean(x.advantage, x.segment)[x.segment]
    ratio = torch.exp(mean + kept - kept.detach())
    clipped = sign * bounded.detach() < sign * difference.detach()
    passes = ~clipped & (sign != 0) & ((x.logp - x.old).detach().abs() <= _MAX_LOG_RATIO)
    weight = torch.where(passes, ratio.detach() * advantage, 0.0)
    return PolicyTerm(-ratio * advantage, weight, ratio.detach(), clipped)


def cispo(x: LossInput, c: Clip) -> PolicyTerm:
    """−sg(clip(ratio))·A·log p: the weight is bounded, no token loses its gradient. https://arxiv.org/abs/2506.13585."""
    ratio = ratio_of(x)[0].detach()
    bounded = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
    weight = bounded * x.advantage
    return PolicyTerm(-weight * x.logp, weight, ratio, bounded != ratio)


def sapo(x: LossInput, c: Gate) -> PolicyTerm:
    """−(4/τ)·sigmoid(τ(ratio−1))·A, a soft gate instead of a clip. https://arxiv.org/abs/2511.20347."""
    ratio, slope = ratio_of(x)
    tau = torch.where(x.advantage > 0, c.positive, c.negative).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1))
    loss = -4 / tau * gate * x.advantage
    open_ = gate.detach()
    weight = 4 * open_ * (1 - open_) * slope * x.advantage
    return PolicyTerm(loss, weight, ratio.detach(), torch.zeros_like(x.segment, dtype=torch.bool))


def dppo(x: LossInput, c: TrustRegion) -> PolicyTerm:
    """−M·ratio·A; M is 0 where the ratio moves away from 1 as A wants and the divergence is above the threshold.

    https://arxiv.org/abs/2602.04879 eq. 11 to 14, the binary divergences; here from the trainer's weights before the
    step, there from the sampler's, which `algo.off_policy.correction` accounts for.
    """
    ratio, slope = ratio_of(x)
    p, q = x.old.detach().exp().clamp(1e-6, 1 - 1e-6), x.logp.detach().exp().clamp(1e-6, 1 - 1e-6)
    distance = (
        (p - q).abs()
        if c.divergence == "tv"
        else p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    )
    outside = (distance > c.threshold) & (x.advantage * (ratio.detach() - 1) > 0)
    kept = torch.where(outside, torch.zeros_like(x.advantage), x.advantage)
    return PolicyTerm(-ratio * kept, slope * kept, ratio.detach(), outside)


def reinforce(x: LossInput, _: Options) -> PolicyTerm:
    """−A·log p, no ratio: for one epoch on fresh samples only. https://doi.org/10.1007/BF00992696 (Williams 1992)."""
    none = torch.zeros_like(x.old).bool()
    return PolicyTerm(-x.advantage * x.logp, x.advantage.clone(), ratio_of(x)[0].detach(), none)


def covariance(logp: Tensor, advantage: Tensor) -> Tensor:
    """[M] (log p − mean)·(A − mean): its share in the entropy's change. https://arxiv.org/abs/2505.22617."""
    return (logp - logp.mean()) * (advantage - advantage.mean())


def select_clip_cov(
    logp: Tensor, advantage: Tensor, c: ClipCov, seed: int, old: Tensor | None
) -> Tensor:
    """[M] bool over a whole mini-batch: tokens drawn from those between the two bounds of the covariance.

    Those that the clip already holds, by their log-probabilities `old`, are not drawn; None: none is held. As the
    paper's authors do: https://github.com/PRIME-RL/Entropy-Mechanism-of-RL
    """
    cov = covariance(logp.detach(), advantage)
    selected = torch.zeros_like(cov, dtype=torch.bool)
    n = max(1, int(c.fraction * len(cov)))
    free = (
        torch.ones_like(selected)
        if old is None
        else ~_is_bound(torch.exp(logp.detach() - old), advantage, c)
    )
    within = torch.nonzero((cov > c.low) & (cov < c.high) & free)[:, 0]
    order = torch.randperm(len(within), generator=torch.Generator().manual_seed(seed)).to(
        within.device
    )
    selected[within[order[:n]]] = True
    return selected


def select_kl_cov(
    logp: Tensor, advantage: Tensor, c: KlCov, seed: int, old: Tensor | None
) -> Tensor:
    """[M] bool over a whole mini-batch: the tokens of the highest covariance."""
    cov = covariance(logp.detach(), advantage)
    selected = torch.zeros_like(cov, dtype=torch.bool)
    if len(cov):
        selected[cov.topk(max(1, int(c.fraction * len(cov)))).indices] = True
    return selected


def clip_cov(x: LossInput, c: ClipCov) -> PolicyTerm:
    """PPO's clip with the selected tokens' gradients cut. https://arxiv.org/abs/2505.22617."""
    selected = (
        x.selected if x.selected is not None else select_clip_cov(x.logp, x.advantage, c, 0, x.old)
    )
    term = ppo_clip(x, c)
    loss, weight = torch.where(selected, 0.0, term.loss), torch.where(selected, 0.0, term.weight)
    return PolicyTerm(loss, weight, term.ratio, term.clipped | selected)


def kl_cov(x: LossInput, c: KlCov) -> PolicyTerm:
    """−ratio·A without a clip, plus coef·|log p − log p_old| on the selected. https://arxiv.org/abs/2505.22617."""
    selected = (
        x.selected if x.selected is not None else select_kl_cov(x.logp, x.advantage, c, 0, None)
    )
    ratio, slope = ratio_of(x)
    difference = x.logp - x.old
    loss = -ratio * x.advantage + torch.where(selected, c.kl_coef * difference.abs(), 0.0)
    weight = slope * x.advantage - torch.where(
        selected, c.kl_coef * difference.detach().sign(), 0.0
    )
    return PolicyTerm(loss, weight, ratio.detach(), selected)


def find(name: str) -> Loss:
    """Return the record of a name or path. A path may name a Loss, or its function. Raises NotFound with the nearest
    names.
    """
    found = resolve("losses", LOSSES, name)
    return found if isinstance(found, Loss) else Loss(found, CustomLoss, "", name, "", "")


def policy_loss(name: str) -> PolicyLoss:
    """Return the function of a name or path. Raises NotFound with the nearest names."""
    function = find(name).function
    found: PolicyLoss = resolve("losses", {}, function) if isinstance(function, str) else function
    return found


def select_tokens(
    options: Options, logp: Tensor, advantage: Tensor, seed: int = 0, old: Tensor | None = None
) -> Tensor | None:
    """[M] bool over a whole mini-batch: the tokens that the loss chooses; None if it chooses none."""
    path = find(options.name).select
    if not path:
        return None
    return cast(Tensor, resolve("losses", {}, path)(logp, advantage, options, seed, old))


def sequence_sum(values: Tensor, segment: Tensor) -> Tensor:
    """[S] sum of each sequence."""
    count = int(segment.max()) + 1 if len(segment) else 0
    return values.new_zeros(count).index_add_(0, segment, values)


def sequence_mean(values: Tensor, segment: Tensor) -> Tensor:
    """[S] mean of each sequence over its tokens in this batch."""
    return sequence_sum(values, segment) / torch.bincount(segment).clamp(min=1)


def token_mean(x: LossInput, t: Totals) -> Tensor:
    """Weigh every token of the batch alike (DAPO, https://arxiv.org/abs/2503.14476)."""
    return torch.full_like(x.old, 1 / max(t.tokens, 1))


def seq_mean(x: LossInput, t: Totals) -> Tensor:
    """Mean over a sequence's tokens, then over sequences (GRPO, https://arxiv.org/abs/2402.03300)."""
    return (1 / (torch.bincount(x.segment).to(x.old.dtype) * max(t.sequences, 1)))[x.segment]


def seq_mean_token_sum(x: LossInput, t: Totals) -> Tensor:
    """Sum over a sequence's tokens, then the mean over sequences: `seq_mean_norm` with the constant 1 (verl)."""
    return torch.full_like(x.old, 1 / max(t.sequences, 1))


def seq_mean_norm(x: LossInput, t: Totals) -> Tensor:
    """Sum over a sequence's tokens / a constant, then the mean (Dr.GRPO, https://arxiv.org/abs/2503.20783)."""
    return torch.full_like(x.old, 1 / max(t.sequences * t.max_tokens, 1))


def episode_mean(x: LossInput, t: Totals) -> Tensor:
    """Mean over an episode's tokens, in however many sequences they lie, then over episodes."""
    if x.episode_tokens is None:
        return seq_mean(x, t)
    each = 1 / (
        x.episode_tokens.to(x.old.dtype) * max(t.sequences if t.episodes is None else t.episodes, 1)
    )
    return each[x.segment]


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean": seq_mean,
    "seq_mean_norm": seq_mean_norm,
    "seq_mean_token_sum": seq_mean_token_sum,
    "episode_mean": episode_mean,
}


OTHER_NAMES: Mapping[str, str] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_norm",
}
"""Names of aggregations elsewhere → the names here."""
