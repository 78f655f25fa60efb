"""What a training step computes of every trained token, from the packed rows to the store (numpy)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl_cli.types import Episode, Float32, TrainSignals
from agentrl_cli.types.signals import REJECTED

Member = tuple[int, int]
"""(bundle, number within it): a token sequence of a step"""


def _nothing() -> Float32:
    return np.zeros(0, np.float32)


@dataclass
class TokenRecord:
    """Per trained token, for one sequence or episode; the arrays have its number of trained tokens."""

    advantage: Float32 = field(default_factory=_nothing)
    old: Float32 | None = None
    """Log-probability before the first optimizer step."""
    ref: Float32 | None = None
    now: Float32 | None = None
    """Log-probability before this optimizer step, where the loss chooses tokens by it."""
    marked: np.ndarray[Any, Any] | None = None
    entropy: Float32 | None = None
    """Entropy before this optimizer step, if tokens are chosen by it."""
    kept: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    """False: rejected, the token is not part of the mini-batch."""
    held: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    """True: the policy term has no gradient."""
    teacher: Float32 | None = None
    """Log-probability under the teacher."""
    teacher_states: np.ndarray[Any, Any] | None = None
    """[n, D] the teacher's hidden states, from which it predicts the tokens, where the loss needs its distribution."""
    reward_advantage: Float32 | None = None
    """The advantage from the reward alone, beside a teacher's."""
    value: Float32 | None = None
    after: float = 0.0
    """Value of the state that a truncated episode was left in, with `algo.value_bootstrap`."""
    returns: Float32 | None = None

    @property
    def valid(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[n] tokens that were not rejected."""
        return np.ones(len(self.advantage), np.bool_) if self.kept is None else self.kept

    ratio: Float32 | None = None
    clipped: np.ndarray[Any, Any] | None = None
    weight: Float32 | None = None


def signals(episode: Episode, seen: TokenRecord) -> TrainSignals:
    """[n] arrays over all tokens of an episode, NaN where a token was not trained."""
    mask = episode.tokens.trained_mask

    def whole(values: Any) -> Float32:
        out = np.full(len(mask), np.nan, np.float32)
        if values is not None:
            out[mask] = values
        return out

    def maybe(values: Any) -> Float32 | None:
        return None if values is None else whole(values)

    clipped = np.zeros(len(mask), np.int8)
    clipped[mask] = np.where(seen.valid, 0 if seen.clipped is None else seen.clipped, REJECTED)
    return TrainSignals(
        advantage=whole(seen.advantage),
        logp_train=whole(seen.old),
        ratio=whole(seen.ratio),
        clipped=clipped,
        weight=whole(seen.weight),
        logp_ref=maybe(seen.ref),
        value=maybe(seen.value),
        returns=maybe(seen.returns),
        logp_teacher=maybe(seen.teacher),
        reward_advantage=maybe(seen.reward_advantage),
    )


def gap(known: Iterable[tuple[Float32 | None, Float32]]) -> dict[str, float]:
    """Return how far the sampler's log-probabilities lie from the trainer's: rounding, or weights that were older.

    `sampling/kl` estimates KL(sampler || trainer) per token, by k3 with the ratio trainer/sampler
    (http://joschu.net/blog/kl-approx.html). Tokens whose sampler did not report the log-probability do not count;
    `sampling/unknown` is their share, if there are any. `known`: (trainer's, sampler's) of each sequence.
    """
    pairs = [(old, sampled) for old, sampled in known if old is not None and len(old)]
    if not pairs:
        return {}
    trainer, sampler = (
        np.concatenate(part).astype(np.float64) for part in zip(*pairs, strict=True)
    )
    finite = np.isfinite(sampler)
    unknown = {} if finite.all() else {"sampling/unknown": float(1 - finite.mean())}
    if not finite.any():
        return unknown
    change = trainer[finite] - sampler[finite]
    return unknown | {
        "sampling/sampling_logp_difference/mean": float(np.abs(change).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(change).max()),
        "sampling/kl": float((np.expm1(change.clip(max=50.0)) - change).mean()),
    }
