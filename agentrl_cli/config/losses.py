"""The policy losses: one record each, with everything that the rest of the program uses.

To add one: a function in learning/losses.py, a record here, and a test with numbers computed by hand. No other code
depends on a loss's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from agentrl_cli.config.choice import Algorithm, Options
from agentrl_cli.types.old_names import OldAttribute


@dataclass(frozen=True, slots=True)
class Loss(Algorithm):
    """A policy loss."""

    select: str
    """`module:object` of a function that selects tokens of the whole mini-batch before the loss; "": none."""
    mark = OldAttribute("select")


def _low(default: float, bound: str = "1 - clip_low") -> Any:
    return Field(default=default, gt=0, le=1, description=f"the ratio is clipped below {bound}")


def _high(default: float, bound: str = "1 + clip_high") -> Any:
    return Field(default=default, gt=0, description=f"the ratio is clipped above {bound}")


class Clip(Options):
    """Options of losses that clip the ratio."""

    clip_low: float = _low(0.2)
    clip_high: float = _high(0.28)


class DualClip(Clip):
    """Options of PPO's clip."""

    clip_dual: float | None = Field(
        default=None,
        gt=1,
        description="bound on the ratio where the advantage is negative, usually 3; null: none",
    )


class SequenceClip(DualClip):
    """For gspo: section 5.1 of https://arxiv.org/abs/2507.18071v2. The mean log ratio of a sequence moves by orders of
    magnitude less than a token's."""

    clip_low: float = _low(3e-4)
    clip_high: float = _high(4e-4)


class LogClip(Clip):
    """Options of geo_mean: bounds of the ratio's logarithm."""

    clip_low: float = _low(0.4, "e^-clip_low")
    clip_high: float = _high(0.4, "e^clip_high")


class Gate(Options):
    """Options of sapo."""

    positive: float = Field(
        default=1.0, gt=0, description="temperature where the advantage is positive"
    )
    negative: float = Field(
        default=1.05, gt=0, description="temperature where the advantage is negative"
    )


class ClipCov(DualClip):
    """Options of clip_cov. The share is from the authors' scripts for 7B models (recipe/entropy/7b_*.sh in verl)."""

    fraction: float = Field(
        default=0.0002, gt=0, le=1, description="share of tokens without gradient"
    )
    low: float = Field(
        default=1.0, description="tokens are drawn from those with a covariance above this"
    )
    high: float = Field(
        default=5.0, description="tokens are drawn from those with a covariance below this"
    )

    @model_validator(mode="after")
    def _check_order(self) -> ClipCov:
        if self.low >= self.high:
            raise ValueError(
                f"algo.loss.low ({self.low:g}) must be below algo.loss.high ({self.high:g})"
            )
        return self


class KlCov(Options):
    """Options of kl_cov. The authors used a share of 0.002 for 7B models, and 0.0002 for 32B, verl's default."""

    fraction: float = Field(
        default=0.002, gt=0, le=1, description="share of tokens that are penalised"
    )
    kl_coef: float = Field(default=1.0, ge=0, description="weight of the penalty")


class TrustRegion(Options):
    """Options of dppo."""

    divergence: Literal["tv", "kl"] = Field(
        default="tv",
        description="between old and new probability of the sampled token against all others",
    )
    threshold: float = Field(
        default=0.15, gt=0, description="divergence above which a token is masked"
    )


class CustomLoss(ClipCov, KlCov, Gate):
    """Options of a user's own function."""

    fraction: float = Field(default=0.0002, gt=0, le=1, description="share of tokens")


_HERE = "agentrl_cli.learning.losses"

LOSSES: Mapping[str, Loss] = {
    "ppo_clip": Loss(
        function=f"{_HERE}:ppo_clip",
        options=DualClip,
        aggregation="",
        text="−min(ratio·A, clip(ratio)·A)",
        source="https://arxiv.org/abs/1707.06347",
        select="",
    ),
    "dapo": Loss(
        function=f"{_HERE}:ppo_clip",
        options=DualClip,
        aggregation="token_mean",
        text="ppo_clip, every token of the batch counts the same",
        source="https://arxiv.org/abs/2503.14476",
        select="",
    ),
    "gspo": Loss(
        function=f"{_HERE}:gspo",
        options=SequenceClip,
        aggregation="seq_mean",
        text="PPO's clip on the geometric mean of a sequence's ratios",
        source="https://arxiv.org/abs/2507.18071",
        select="",
    ),
    "geo_mean": Loss(
        function=f"{_HERE}:geo_mean",
        options=LogClip,
        aggregation="seq_mean",
        text="geometric mean of a sequence's clipped ratios (GMPO)",
        source="https://arxiv.org/abs/2507.20673",
        select="",
    ),
    "cispo": Loss(
        function=f"{_HERE}:cispo",
        options=Clip,
        aggregation="token_mean",
        text="−sg(clip(ratio))·A·log p: the weight is bounded, no token loses its gradient",
        source="https://arxiv.org/abs/2506.13585",
        select="",
    ),
    "sapo": Loss(
        function=f"{_HERE}:sapo",
        options=Gate,
        aggregation="seq_mean",
        text="a soft gate on the ratio instead of a clip",
        source="https://arxiv.org/abs/2511.20347",
        select="",
    ),
    "clip_cov": Loss(
        function=f"{_HERE}:clip_cov",
        options=ClipCov,
        aggregation="",
        text="ppo_clip without the gradient of some tokens of high covariance",
        source="https://arxiv.org/abs/2505.22617",
        select=f"{_HERE}:select_clip_cov",
    ),
    "kl_cov": Loss(
        function=f"{_HERE}:kl_cov",
        options=KlCov,
        aggregation="",
        text="−ratio·A, and a KL penalty on the tokens of the highest covariance",
        source="https://arxiv.org/abs/2505.22617",
        select=f"{_HERE}:select_kl_cov",
    ),
    "dppo": Loss(
        function=f"{_HERE}:dppo",
        options=TrustRegion,
        aggregation="",
        text="−ratio·A without the tokens that leave the trust region: a binary divergence instead of the ratio's clip",
        source="https://arxiv.org/abs/2602.04879",
        select="",
    ),
    "reinforce": Loss(
        function=f"{_HERE}:reinforce",
        options=Options,
        aggregation="",
        text="−A·log p, no ratio: for one epoch on fresh samples only",
        source="https://doi.org/10.1007/BF00992696",
        select="",
    ),
}
