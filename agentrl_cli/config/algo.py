"""The settings of the algorithm: advantage, loss, KL, entropy, the sampler's correction, the value head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from agentrl_cli.config.choice import Algorithm, Options, choose, option_names, renamed
from agentrl_cli.config.estimators import ESTIMATORS, CustomEstimator
from agentrl_cli.config.losses import LOSSES, CustomLoss
from agentrl_cli.types.section import Positive, Section

CHOICES: Mapping[str, tuple[Mapping[str, Algorithm], str]] = {
    "advantage": (ESTIMATORS, "grpo"),
    "loss": (LOSSES, "ppo_clip"),
}
"""Key of `algo` → its records and its default name."""

EstimatorChoice = Annotated[
    SerializeAsAny[Options], BeforeValidator(partial(choose, ESTIMATORS, "grpo", CustomEstimator))
]
LossChoice = Annotated[
    SerializeAsAny[Options], BeforeValidator(partial(choose, LOSSES, "ppo_clip", CustomLoss))
]


def option_keys() -> list[str]:
    """Return every dotted key of an option, of any estimator or loss."""
    names = {
        f"algo.{key}.{option}": None
        for key, (table, _) in CHOICES.items()
        for each in table.values()
        for option in option_names(each.options)
    }
    return list(names)


Rejection = Literal[
    "none", "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


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
        description="token_mean, seq_mean, seq_mean_norm, seq_mean_token_sum, episode_mean, or another trainer's name"
        " (seq-mean-token-sum …), or module:object; auto: that of the loss's or the estimator's paper, else token_mean."
        " If an agent's episodes branch, token_mean weighs tokens, seq_* branches, episode_mean rollouts",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the reference model; 0 loads none"
    )
    kl: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k3", description="estimate of the KL: k1, k2, k3, or abs, the absolute value of k1"
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="the KL is a term of the loss, or subtracted from each token's reward",
    )
    kl_unbiased: bool = Field(
        default=False,
        description="weigh the loss's KL term with the ratio, which makes its gradient unbiased",
    )
    kl_target: float | None = Field(
        default=None, gt=0, description="adapt kl_coef towards this KL per token; null: constant"
    )
    ref_ema: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="after ref_ema_steps steps the reference becomes (1 - ref_ema) x itself + ref_ema x the trained"
        " weights; 0: it stays the model at the start",
    )
    ref_ema_steps: Positive = Field(
        default=1, description="steps between two changes of the reference"
    )
    entropy_coef: float = Field(default=0.0, description="weight of the entropy bonus")
    entropy_target: float | None = Field(
        default=None,
        gt=0,
        description="adapt entropy_coef to keep this entropy, nats per token; null: constant",
    )
    entropy_step: float = Field(
        default=0.005, gt=0, description="by how much entropy_coef changes after each step"
    )
    off_policy_mask: float | None = Field(
        default=None,
        gt=0,
        description="no gradient for tokens with a negative advantage in a sequence whose mean log-probability fell by"
        " more than this since it was sampled (DeepSeek-V3.2), e.g. 0.5; null: none",
    )
    entropy_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of tokens, those of the highest entropy, with a gradient, e.g. 0.2",
    )
    bypass: bool = Field(
        default=False,
        description="ratios against the sampler's log-probabilities instead of the trainer's before the step (verl's"
        " bypass mode): saves a forward; the loss's clip bounds the gap between them, which is then not"
        " measured, so the alert mismatch stays silent",
    )
    reject: Rejection = Field(
        default="none",
        description="leave out tokens or sequences on which trainer and sampler differ beyond reject_upper: k1 is the"
        " log ratio (seq_mean_k1: the geometric mean of a sequence), k2 and k3 are divergences. One of none,"
        " token_k1/k2/k3, seq_sum_k1/k2/k3, seq_mean_k1/k2/k3, seq_max_k2/k3",
    )
    reject_upper: float | None = Field(
        default=None,
        gt=0,
        description="bound of reject: a ratio for k1, e.g. 1.1; nats for k2 and k3, e.g. 0.01",
    )
    reject_lower: float | None = Field(
        default=None, gt=0, description="lower bound of the ratio for k1; null: 1 / reject_upper"
    )
    correction: Literal["auto", "none", "tis", "tis_sequence", "mis", "mis_sequence"] = Field(
        default="auto",
        description="corrects the gap between sampler and trainer: tis truncates the ratio at the cap, mis masks above"
        " it, per token or per sequence; auto: tis if sampling is truncated or asynchronous, else none",
    )
    correction_cap: float = Field(default=2.0, gt=0, description="the cap of tis and mis")
    correction_floor: float | None = Field(
        default=None,
        gt=0,
        description="lower bound: tis raises smaller ratios to it, mis masks them; null: none",
    )
    value_lr: float = Field(
        default=1e-3, gt=0, description="gae: peak learning rate of the value head"
    )
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        description="gae: clips the value loss beyond this distance from the old value; null: never",
    )
    value_bootstrap: bool = Field(
        default=False,
        description="gae: bootstrap a truncated episode from the value of its last state; false: it ends there with"
        " its reward (as in verl and TRL)",
    )
    value_coef: float = Field(
        default=0.0,
        ge=0,
        description="gae: weight of the value loss in the policy's gradient; 0: train the head only",
    )
    mask_overlong: bool = Field(
        default=False,
        description="skip episodes that ran out of tokens, in training and in advantages",
    )
    mask_void: bool = Field(
        default=False,
        description="skip episodes with a void turn: empty, cut by a limit, or with malformed calls alone (SimpleTIR)",
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
            raise ValueError(
                "algo.kl_target adapts algo.kl_coef, which is 0: set its initial value, e.g. 0.001"
            )
        if self.ref_ema and not self.kl_coef:
            raise ValueError(
                "algo.ref_ema moves the reference of the KL term, but algo.kl_coef is 0"
            )
        self._fits_rejection()
        if self.kl_unbiased and self.kl_in == "reward":
            raise ValueError("algo.kl_unbiased needs the KL in the loss, but algo.kl_in is reward")
        if self.kl_in == "reward" and self.kl_coef and self.advantage.name in ("gdpo", "turn_gdpo"):
            raise ValueError(
                f"{self.advantage.name} normalises reward parts, and a token's KL is not one: set algo.kl_in: loss"
            )
        return self

    def _fits_rejection(self) -> None:
        if self.reject != "none" and self.reject_upper is None:
            raise ValueError(
                f"algo.reject {self.reject} needs algo.reject_upper, e.g. 1.1 for k1, 0.01 for k2 and k3"
            )
        k1 = self.reject.endswith("k1")
        if self.reject_lower is not None and not k1:
            raise ValueError("algo.reject_lower is a bound of the ratio, for algo.reject with k1")
        if k1 and self.reject_upper is not None:
            lower = 1 / self.reject_upper if self.reject_lower is None else self.reject_lower
            if lower > self.reject_upper:
                raise ValueError(
                    f"algo.reject_lower ({lower:g}) must be below algo.reject_upper; ratios are near 1"
                )
        if self.bypass and (self.reject != "none" or self.correction not in ("auto", "none")):
            raise ValueError(
                "algo.bypass leaves out the trainer's forward before the step, which algo.reject and algo.correction"
                " compare with: leave them out, or bypass"
            )
