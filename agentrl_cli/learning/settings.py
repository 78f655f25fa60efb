"""Makes the loss, its aggregation and its numbers from the configuration."""

from __future__ import annotations

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.learning import advantages, losses
from agentrl_cli.learning.losses import AGGREGATIONS, OTHER_NAMES, Aggregation, LossConfig
from agentrl_cli.registry import resolve


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
