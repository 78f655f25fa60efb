"""Weights of the KL and entropy terms: constant, or adapted towards a target after each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.learning.losses import LossConfig


def adapt_kl_coef(
    coef: float, kl: float, target: float, tokens: int, horizon: int = 10_000
) -> float:
    """Return the next KL coefficient: up where KL is above its target. https://arxiv.org/abs/1909.08593

    At most by a fifth in one step, however many tokens it had: a step longer than the horizon would overshoot, and
    from five times its length on make the coefficient negative.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(tokens / horizon, 1.0))


def adapt_entropy_coef(
    coef: float, entropy: float, target: float, delta: float = 0.005, top: float = 1.0
) -> float:
    """Return the next entropy coefficient: up by delta while entropy is below its target, else down; in [0, top].

    https://arxiv.org/abs/2505.22312 (Skywork-OR1). The bonus is meant to be off above the target.
    """
    return min(max(coef + (delta if entropy < target else -delta), 0.0), top)


@dataclass
class Coefficients:
    """The present weights of KL and entropy: constant, or adapted towards a target after every step."""

    algo: AlgoConfig
    kl: float
    entropy: float
    seen: float | None = None
    """Entropy of the last step; above its target the bonus is off."""

    @classmethod
    def of(cls, algo: AlgoConfig) -> Coefficients:
        return cls(algo, algo.kl.coef, algo.entropy.coef)

    @property
    def in_reward(self) -> bool:
        """Whether the KL term is taken off the reward."""
        return bool(self.algo.kl.coef) and self.algo.kl.where == "reward"

    @property
    def bonus(self) -> float:
        """The entropy coefficient that counts in the next step. https://arxiv.org/abs/2505.22312"""
        target, seen = self.algo.entropy.target, self.seen
        return 0.0 if target is not None and seen is not None and seen > target else self.entropy

    def apply(self, c: LossConfig) -> LossConfig:
        """Return the loss's numbers with these in them."""
        return replace(
            c, kl_coef=self.kl if self.algo.kl.where == "loss" else 0.0, entropy_coef=self.bonus
        )

    def adapt(self, metrics: Mapping[str, float], tokens: int) -> None:
        """Steer after a step of so many trained tokens, by its `kl` and `entropy`."""
        algo = self.algo
        if algo.kl.target is not None and "kl" in metrics:
            self.kl = adapt_kl_coef(self.kl, metrics["kl"], algo.kl.target, tokens)
        if "entropy" in metrics:
            self.seen = metrics["entropy"]
            if algo.entropy.target is not None:
                self.entropy = adapt_entropy_coef(
                    self.entropy, self.seen, algo.entropy.target, algo.entropy.step
                )

    def metrics(self) -> dict[str, float]:
        """Return those that are steered, as they counted."""
        kl = {} if self.algo.kl.target is None else {"kl_coef": self.kl}
        return kl | ({} if self.algo.entropy.target is None else {"entropy_coef": self.bonus})

    def state(self) -> dict[str, float | None]:
        """Return the values that a checkpoint keeps."""
        return {"kl": self.kl, "entropy": self.entropy, "seen": self.seen}

    def load(self, state: Mapping[str, float | None]) -> None:
        """Continue from a checkpoint; a coefficient without a target keeps its configured value."""
        if self.algo.kl.target is not None:
            self.kl = float(state["kl"] or 0.0)
        if self.algo.entropy.target is not None:
            self.entropy = float(state["entropy"] or 0.0)
        self.seen = state["seen"]
