"""The settings of the algorithm: advantage, loss, KL, entropy, the sampler's correction, the value head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from agentrl_cli.config.base import Positive, Section
from agentrl_cli.config.choice import Algorithm, Options, choose, option_names, renamed
from agentrl_cli.config.estimators import ESTIMATORS, CustomEstimator
from agentrl_cli.config.losses import LOSSES, CustomLoss

CHOICES: Mapping[str, tuple[Mapping[str, Algorithm], str]] = {
    "advantage": (ESTIMATORS, "grpo"),
    "loss": (LOSSES, "ppo_clip"),
}
"""Key of `algo` → its records and its default name."""

EstimatorChoice = Annotated[
    SerializeAsAny[Options], BeforeValidator(partial(choose, ESTIMATORS, "grpo", CustomEstimator))
]
LossChoice = Annotated[SerializeAsAny[Options], BeforeValidator(partial(choose, LOSSES, "ppo_clip", CustomLoss))]


def option_keys() -> list[str]:
    """Every dotted key of an option, of any estimator or loss."""
    names = {
        f"algo.{key}.{option}": None
        for key, (table, _) in CHOICES.items()
        for each in table.values()
        for option in option_names(each.options)
    }
    return list(names)


class AlgoConfig(Section):
    """How rewards become gradients."""

    advantage: EstimatorChoice = Field(
        default="grpo",  # type: ignore[assignment]  # validation replaces the name by its options
        description="estimator: "
        + ", ".join(ESTIMATORS)
        + ", or module:object; with options: {name: gae, lambda: 0.95}",
    )
    drop_zero_variance: bool = Field(
        default=True,
        description="skip groups whose rewards are all equal, where advantages are relative to the group",
    )
    loss: LossChoice = Field(
        default="ppo_clip",  # type: ignore[assignment]
        description="policy loss: "
        + ", ".join(LOSSES)
        + ", or module:object; with options: {name: gspo, clip_low: 0.001}",
    )
    aggregation: str = Field(
        default="auto",
        description="token_mean, seq_mean, seq_mean_norm, seq_mean_token_sum, episode_mean, verl's name of one"
        " (seq-mean-token-sum …), or module:object; auto: that of the loss's or the estimator's paper, else token_mean."
        " If an agent's episodes branch, token_mean weighs tokens, seq_* branches, episode_mean rollouts",
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference model; 0 loads none")
    kl: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k3", description="estimate of the KL: k1, k2, k3, or abs, the absolute value of k1"
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="the KL is a term of the loss, or subtracted from each token's reward"
    )
    kl_unbiased: bool = Field(
        default=False, description="weigh the loss's KL term with the ratio, which makes its gradient unbiased"
    )
    kl_target: float | None = Field(
        default=None, gt=0, description="adapt kl_coef towards this KL per token; null: constant"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus")
    entropy_target: float | None = Field(
        default=None, gt=0, description="adapt entropy_coef to keep this entropy, nats per token; null: constant"
    )
    entropy_step: float = Field(default=0.005, gt=0, description="by how much entropy_coef changes after each step")
    correction: Literal["auto", "none", "tis", "tis_sequence", "mis", "mis_sequence"] = Field(
        default="auto",
        description="corrects the gap between sampler and trainer: tis truncates the ratio at the cap, mis masks above"
        " it, per token or per sequence; auto: tis if sampling is truncated or asynchronous, else none",
    )
    correction_cap: float = Field(default=2.0, gt=0, description="the cap of tis and mis")
    correction_floor: float | None = Field(
        default=None, gt=0, description="lower bound: tis raises smaller ratios to it, mis masks them; null: none"
    )
    value_lr: float = Field(default=1e-3, gt=0, description="gae: peak learning rate of the value head")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="gae: clips the value loss beyond this distance from the old value; null: never"
    )
    value_bootstrap: bool = Field(
        default=False,
        description="gae: bootstrap a truncated episode from the value of its last state; false: it ends there with"
        " its reward (as in verl and TRL)",
    )
    value_coef: float = Field(
        default=0.0, ge=0, description="gae: weight of the value loss in the policy's gradient; 0: train the head only"
    )
    mask_overlong: bool = Field(
        default=False, description="skip episodes that ran out of tokens, in training and in advantages"
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

    @model_validator(mode="before")
    @classmethod
    def _new_names(cls, given: Any) -> Any:
        return renamed(given, CHOICES)

    @model_validator(mode="after")
    def _fits(self) -> AlgoConfig:
        if self.correction_floor is not None and self.correction_floor >= self.correction_cap:
            raise ValueError("algo.correction_floor must be below algo.correction_cap")
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("algo.kl_target adapts algo.kl_coef, which is 0: set its initial value, e.g. 0.001")
        if self.kl_unbiased and self.kl_in == "reward":
            raise ValueError("algo.kl_unbiased needs the KL in the loss, but algo.kl_in is reward")
        return self
