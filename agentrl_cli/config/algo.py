"""The settings of the algorithm: advantage, loss, KL, entropy, the sampler's correction, the value head."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl_cli.config.base import Positive, Section, Unit


class AlgoConfig(Section):
    """How rewards become gradients."""

    advantage: str = Field(
        default="grpo",
        description="estimator: grpo, dr_grpo, batch, rloo, reinforce_pp, reinforce_pp_baseline, remax, opo, gdpo,"
        " pass_at_k, grpo_passk, gae (PPO), turn_returns, mt_grpo, gigpo, or module:object",
    )
    gamma: Unit = Field(
        default=1.0,
        description="discount, per trained token in gae and reinforce_pp, per assistant turn in turn_returns, mt_grpo"
        " and gigpo",
    )
    lam: Unit = Field(default=1.0, description="gae's lambda: 1 trusts the returns, 0 the value head")
    pass_k: Positive = Field(default=2, description="k of the estimator pass_at_k")
    turn_coef: float = Field(
        default=1.0, ge=0, description="weight of the turn's advantage beside the episode's: mt_grpo, gigpo"
    )
    advantage_eps: float = Field(default=1e-4, ge=0, description="added to a group's standard deviation")
    drop_zero_variance: bool = Field(
        default=True,
        description="skip groups whose rewards are all equal, where advantages are relative to the group",
    )
    loss: str = Field(
        default="ppo_clip",
        description="policy loss: ppo_clip, dapo, gspo, geo_mean (GMPO), cispo, sapo, clip_cov, kl_cov, reinforce, or"
        " module:object",
    )
    aggregation: str = Field(
        default="auto",
        description="token_mean, seq_mean, seq_mean_norm, seq_mean_token_sum, episode_mean, verl's name of one"
        " (seq-mean-token-sum …), or module:object; auto: seq_mean for gspo, geo_mean and sapo, seq_mean_norm for the"
        " advantage dr_grpo, token_mean elsewhere",
    )
    clip_low: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="the ratio is clipped below 1 - clip_low; null: 0.2, with gspo its paper's 0.0003, since the mean"
        " ratio of a sequence moves by orders less than a token's, with geo_mean 0.4 (below e^-clip_low)",
    )
    clip_high: float | None = Field(
        default=None,
        gt=0,
        description="the ratio is clipped above 1 + clip_high; null: 0.28, with gspo 0.0004, with geo_mean 0.4 (above"
        " e^clip_high)",
    )
    clip_dual: float | None = Field(
        default=None, gt=1, description="bound on the ratio where the advantage is negative, usually 3; null: none"
    )
    sapo_positive: float = Field(default=1.0, gt=0, description="sapo's temperature where the advantage is positive")
    sapo_negative: float = Field(default=1.05, gt=0, description="sapo's temperature where it is negative")
    cov_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of tokens that clip_cov or kl_cov touch; null: 0.0002 with clip_cov, 0.002 with kl_cov, what"
        " its authors took for 7B models (for 32B they, and verl by default, took 0.0002)",
    )
    cov_low: float = Field(default=1.0, description="clip_cov draws from tokens of a covariance above this")
    cov_high: float = Field(default=5.0, description="clip_cov draws from tokens of a covariance below this")
    cov_kl_coef: float = Field(default=1.0, ge=0, description="weight of kl_cov's penalty on the tokens it touches")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference model; 0 loads none")
    kl: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k3", description="estimate of the KL: k1, k2, k3, or abs, the absolute value of k1"
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="the KL is a term of the loss, or taken off each token's reward"
    )
    kl_unbiased: bool = Field(
        default=False, description="weigh the loss's KL term with the ratio, which makes its gradient unbiased"
    )
    kl_target: float | None = Field(
        default=None, gt=0, description="kl_coef is steered towards this KL per token; null: it stays"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus")
    entropy_target: float | None = Field(
        default=None, gt=0, description="entropy_coef is steered to keep this entropy, nats per token; null: it stays"
    )
    entropy_step: float = Field(default=0.005, gt=0, description="by how much it is steered after each step")
    correction: Literal["auto", "none", "tis", "tis_sequence", "mis", "mis_sequence"] = Field(
        default="auto",
        description="weight for the gap between sampler and trainer: tis truncates the ratio at the cap, mis masks what"
        " is above it, per token or per sequence; auto: tis where sampling is truncated or runs ahead, else none",
    )
    correction_cap: float = Field(default=2.0, gt=0, description="the cap of tis and mis")
    correction_floor: float | None = Field(
        default=None, gt=0, description="lower bound: tis raises smaller ratios to it, mis masks them; null: none"
    )
    value_lr: float = Field(default=1e-3, gt=0, description="gae: peak learning rate of the value head")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="gae: a value's loss is held beyond this move from the old value; null: never"
    )
    value_bootstrap: bool = Field(
        default=False,
        description="gae: an episode that a limit cut off goes on with the value of the state it was left in; false: it"
        " ended there, with the reward that it got (what verl and TRL do)",
    )
    value_coef: float = Field(
        default=0.0, ge=0, description="gae: weight of the value loss in the policy's gradient; 0: the head's alone"
    )
    mask_overlong: bool = Field(
        default=False, description="skip episodes that ran out of tokens: neither trained nor compared with"
    )
    overlong_penalty: float = Field(
        default=0.0,
        ge=0,
        description="weight of the reward part `overlong`, -1 for an episode at its token limit; 0: none",
    )
    overlong_buffer: Positive = Field(
        default=128, description="tokens before the limit over which `overlong` falls from 0 to -1"
    )
    length_penalty: float = Field(
        default=0.0,
        ge=0,
        description="weight of the reward part `length_penalty`, -(sampled tokens / max_tokens); 0: none",
    )
    epochs: Positive = Field(default=1, description="passes over a step's episodes")
    minibatches: Positive = Field(default=1, description="optimizer steps in a pass")

    @model_validator(mode="after")
    def _fits(self) -> AlgoConfig:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"algo.cov_low ({self.cov_low:g}) must be below algo.cov_high ({self.cov_high:g})")
        if self.correction_floor is not None and self.correction_floor >= self.correction_cap:
            raise ValueError("algo.correction_floor must be below algo.correction_cap")
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("algo.kl_target steers algo.kl_coef, which is 0: set it to where it starts, 0.001 say")
        if self.kl_unbiased and self.kl_in == "reward":
            raise ValueError("algo.kl_unbiased is about the KL in the loss, and algo.kl_in is reward")
        return self
