"""From the configuration to what the losses are given, and the coefficients that are steered while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentrl_cli.config import Config
from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.learning.advantages import find, needs
from agentrl_cli.learning.losses import AGGREGATIONS, BOUNDS, LOSSES, PAIRED, VERL, Aggregation, LossConfig
from agentrl_cli.learning.terms import adapt_entropy_coef, adapt_kl_coef
from agentrl_cli.registry import resolve


def loss_config(config: Config) -> LossConfig:
    """The numbers of the configured loss."""
    algo, rollout = config.algo, config.rollout
    other = rollout.truncates or rollout.async_staleness > 0  # than what is trained
    correction = algo.correction if algo.correction != "auto" else "tis" if other else "none"
    low, high = BOUNDS.get(algo.loss, (LossConfig().clip_low, LossConfig().clip_high))
    return LossConfig(
        clip_low=low if algo.clip_low is None else algo.clip_low,
        clip_high=high if algo.clip_high is None else algo.clip_high,
        clip_dual=algo.clip_dual,
        sapo_positive=algo.sapo_positive,
        sapo_negative=algo.sapo_negative,
        cov_fraction=algo.cov_fraction,
        cov_low=algo.cov_low,
        cov_high=algo.cov_high,
        cov_kl_coef=algo.cov_kl_coef,
        kl=algo.kl,
        kl_coef=algo.kl_coef if algo.kl_in == "loss" else 0.0,
        kl_unbiased=algo.kl_unbiased,
        entropy_coef=algo.entropy_coef,
        correction=correction,
        correction_cap=algo.correction_cap,
        correction_floor=algo.correction_floor,
    )


def aggregation_name(algo: AlgoConfig) -> str:
    """What `algo.aggregation` means, by our name or verl's: `auto` is that of the loss's paper, or of Dr.GRPO's."""
    if algo.aggregation != "auto":
        return VERL.get(algo.aggregation, algo.aggregation)
    if algo.loss in PAIRED:
        return PAIRED[algo.loss]
    return "seq_mean_norm" if algo.advantage == "dr_grpo" else "token_mean"


def find_aggregation(algo: AlgoConfig) -> Aggregation:
    """The aggregation. Raises NotFound with the nearest names."""
    found: Aggregation = resolve("aggregations", AGGREGATIONS, aggregation_name(algo))
    return found


def check(algo: AlgoConfig) -> None:
    """Raise NotFound, naming the nearest, for an estimator, a loss or an aggregation that there is not.

    Before a model is loaded and a run is written down.
    """
    needs(algo.advantage)
    find(algo.advantage)
    resolve("losses", LOSSES, algo.loss)
    find_aggregation(algo)


@dataclass
class Coefficients:
    """The weights of KL and entropy now: constant, or steered towards a target after every step."""

    algo: AlgoConfig
    kl: float
    entropy: float
    seen: float | None = None
    """Entropy of the last step; above its target the bonus is off."""

    @classmethod
    def of(cls, algo: AlgoConfig) -> Coefficients:
        return cls(algo, algo.kl_coef, algo.entropy_coef)

    @property
    def bonus(self) -> float:
        """The entropy coefficient that counts in the next step. https://arxiv.org/abs/2505.22312"""
        target = self.algo.entropy_target
        return 0.0 if target is not None and self.seen is not None and self.seen > target else self.entropy

    def apply(self, c: LossConfig) -> LossConfig:
        """The loss's numbers with these in them."""
        return replace(c, kl_coef=self.kl if self.algo.kl_in == "loss" else 0.0, entropy_coef=self.bonus)

    def adapt(self, metrics: Mapping[str, float], tokens: int) -> None:
        """Steer after a step of so many trained tokens, by its `kl` and `entropy`."""
        algo = self.algo
        if algo.kl_target is not None and "kl" in metrics:
            self.kl = adapt_kl_coef(self.kl, metrics["kl"], algo.kl_target, tokens)
        if "entropy" in metrics:
            self.seen = metrics["entropy"]
            if algo.entropy_target is not None:
                self.entropy = adapt_entropy_coef(self.entropy, self.seen, algo.entropy_target, algo.entropy_step)

    def metrics(self) -> dict[str, float]:
        """Those that are steered, as they counted."""
        steered = {"kl_coef": self.algo.kl_target is not None, "entropy_coef": self.algo.entropy_target is not None}
        values = {"kl_coef": self.kl, "entropy_coef": self.bonus}
        return {name: values[name] for name, on in steered.items() if on}

    def state(self) -> dict[str, float | None]:
        """What a checkpoint keeps."""
        return {"kl": self.kl, "entropy": self.entropy, "seen": self.seen}

    def load(self, state: Mapping[str, float | None]) -> None:
        """Go on from a checkpoint; what is not steered is what the configuration says now."""
        if self.algo.kl_target is not None:
            self.kl = float(state["kl"] or 0.0)
        if self.algo.entropy_target is not None:
            self.entropy = float(state["entropy"] or 0.0)
        self.seen = state["seen"]
