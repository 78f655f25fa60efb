"""The settings of the algorithm: advantage, loss, KL, entropy, data of older weights, episodes that are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from agentrl_cli.config.choice import Algorithm, Options, choose
from agentrl_cli.config.estimators import ESTIMATORS, CustomEstimator, Gae
from agentrl_cli.config.losses import LOSSES, CustomLoss
from agentrl_cli.types.section import Group, Positive, Section, refuse

CHOICES: Mapping[str, tuple[Mapping[str, Algorithm], str]] = {
    "algo.advantage": (ESTIMATORS, "grpo"),
    "algo.loss": (LOSSES, "ppo_clip"),
}
"""Key of a choice → its records and its default name."""

EstimatorChoice = Annotated[
    SerializeAsAny[Options], BeforeValidator(partial(choose, ESTIMATORS, "grpo", CustomEstimator))
]
LossChoice = Annotated[
    SerializeAsAny[Options], BeforeValidator(partial(choose, LOSSES, "ppo_clip", CustomLoss))
]

Rejection = Literal[
    "none", "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


class KlConfig(Group):
    """The KL to the reference model."""

    coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the reference model; 0 loads none"
    )
    estimate: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k3", description="estimate of the KL: k1, k2, k3, or abs, the absolute value of k1"
    )
    where: Literal["loss", "reward"] = Field(
        default="loss",
        description="the KL is a term of the loss, or subtracted from each token's reward",
    )
    unbiased: bool = Field(
        default=False,
        description="weigh the loss's KL term with the ratio, which makes its gradient unbiased",
    )
    target: float | None = Field(
        default=None, gt=0, description="adapt coef towards this KL per token; null: constant"
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

    @model_validator(mode="after")
    def _fits(self) -> KlConfig:
        refuse(
            (
                self.target is not None and not self.coef,
                "algo.kl.target adapts algo.kl.coef, which is 0: set its initial value, e.g. 0.001",
            ),
            (
                self.ref_ema and not self.coef,
                "algo.kl.ref_ema moves the reference of the KL term, but algo.kl.coef is 0",
            ),
            (
                self.unbiased and self.where == "reward",
                "algo.kl.unbiased needs the KL in the loss, but algo.kl.where is reward",
            ),
        )
        return self


class EntropyConfig(Group):
    """The entropy bonus, and tokens chosen by their entropy."""

    coef: float = Field(default=0.0, description="weight of the entropy bonus")
    target: float | None = Field(
        default=None,
        gt=0,
        description="adapt coef to keep this entropy, nats per token; null: constant",
    )
    step: float = Field(default=0.005, gt=0, description="by how much coef changes after each step")
    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of tokens, those of the highest entropy, with a gradient, e.g. 0.2",
    )


class OffPolicyConfig(Group):
    """Tokens that were sampled from other weights, or by other numerics, than are trained."""

    correction: Literal["auto", "none", "tis", "tis_sequence", "mis", "mis_sequence"] = Field(
        default="auto",
        description="corrects the gap between sampler and trainer: tis truncates the ratio at the cap, mis masks above"
        " it, per token or per sequence; auto: tis if sampling is truncated or asynchronous, else none",
    )
    cap: float = Field(default=2.0, gt=0, description="the cap of tis and mis")
    floor: float | None = Field(
        default=None,
        gt=0,
        description="lower bound: tis raises smaller ratios to it, mis masks them; null: none",
    )
    mask: float | None = Field(
        default=None,
        gt=0,
        description="no gradient for tokens with a negative advantage in a sequence whose mean log-probability fell by"
        " more than this since it was sampled (DeepSeek-V3.2), e.g. 0.5; null: none",
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

    @model_validator(mode="after")
    def _fits(self) -> OffPolicyConfig:
        k1, upper = self.reject.endswith("k1"), self.reject_upper or 1.0
        lower = 1 / upper if self.reject_lower is None else self.reject_lower
        refuse(
            (
                self.floor is not None and self.floor >= self.cap,
                "algo.off_policy.floor must be below algo.off_policy.cap",
            ),
            (
                self.reject != "none" and self.reject_upper is None,
                f"algo.off_policy.reject {self.reject} needs reject_upper, e.g. 1.1 for k1, 0.01 for k2 and k3",
            ),
            (
                self.reject_lower is not None and not k1,
                "algo.off_policy.reject_lower is a bound of the ratio, for reject with k1",
            ),
            (
                k1 and lower > upper,
                f"algo.off_policy.reject_lower ({lower:g}) must be below reject_upper; ratios are near 1",
            ),
        )
        if self.bypass and (self.reject != "none" or self.correction not in ("auto", "none")):
            raise ValueError(
                "algo.off_policy.bypass leaves out the trainer's forward before the step, which reject and correction"
                " compare with: leave them out, or bypass"
            )
        return self


class SkipConfig(Group):
    """Episodes and groups that are sampled and not trained."""

    bare = True

    zero_variance: bool = Field(
        default=True,
        description="groups whose rewards are all equal, where advantages are relative to the group",
    )
    overlong: bool = Field(
        default=False,
        description="episodes that ran out of tokens, in training and in advantages",
    )
    void: bool = Field(
        default=False,
        description="episodes with a void turn: empty, cut by a limit, or with malformed calls alone (SimpleTIR)",
    )
    drift: bool = Field(
        default=True,
        description="episodes whose turn structure drifted: they end there; false keeps and trains them",
    )
    groups: list[Annotated[str, Field(pattern=r"^\d{6}-\d{3}$")]] = Field(
        default_factory=list,
        description="these groups, e.g. [000012-003]: a training is repeated without those that"
        " `agentrl why EPISODE@t2.31` names",
    )


class LengthPenaltyConfig(Group):
    """Reward parts for the length of an episode."""

    coef: float = Field(
        default=0.0,
        ge=0,
        description="weight of the reward part `length_penalty`, -(sampled tokens / max_tokens); 0: none",
    )
    overlong: float = Field(
        default=0.0,
        ge=0,
        description="weight of the reward part `overlong`, -1 for an episode at its token limit; 0: none",
    )
    buffer: Positive = Field(
        default=128, description="tokens before the limit over which `overlong` falls from 0 to -1"
    )


class AlgoConfig(Section):
    """How rewards become gradients."""

    advantage: EstimatorChoice = Field(
        default="grpo",  # type: ignore[assignment]  # validation replaces the name by its options
        description="estimator: "
        + ", ".join(ESTIMATORS)
        + ", or module:object; with options: {name: gae, lambda: 0.95}",
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
    kl: KlConfig = Field(
        default_factory=KlConfig,
        description="weight of the KL to the reference model, 0 loads none; with options: {coef: 0.01, where: reward}",
    )
    entropy: EntropyConfig = Field(
        default_factory=EntropyConfig,
        description="weight of the entropy bonus; with options: {coef: 0.001, target: 0.5}",
    )
    off_policy: OffPolicyConfig = Field(
        default_factory=OffPolicyConfig,
        description="correction of the gap between sampler and trainer: auto, none, tis, tis_sequence, mis,"
        " mis_sequence; with options: {correction: mis, cap: 3, mask: 0.5}",
    )
    skip: SkipConfig = Field(
        default_factory=SkipConfig, description="episodes and groups that are not trained"
    )
    length_penalty: LengthPenaltyConfig = Field(
        default_factory=LengthPenaltyConfig,
        description="weight of a reward part for length; with options: {overlong: 1.0, buffer: 128}",
    )
    epochs: Positive = Field(default=1, description="passes over a step's episodes")
    minibatches: Positive = Field(default=1, description="optimizer steps in a pass")

    @property
    def value_head(self) -> Gae:
        """Return the settings of the value head: the estimator's, or the defaults."""
        return self.advantage if isinstance(self.advantage, Gae) else Gae(name="gae")

    @model_validator(mode="after")
    def _fits(self) -> AlgoConfig:
        name, in_reward = self.advantage.name, self.kl.where == "reward" and self.kl.coef
        text = f"{name} compares parts of the reward, and a token's KL is not one: set algo.kl.where: loss"
        refuse((in_reward and name in ("gdpo", "turn_gdpo", "rae"), text))
        return self
