"""Numbers that training adds to the tokens of an episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]


REJECTED = 2
"""`algo.off_policy.reject` left the token out of the mini-batch."""
MASKED = 3
"""`algo.entropy.share` took the token's gradient."""
FAR = 4
"""`algo.off_policy.mask` or a masking correction took it: the weights have moved too far since sampling."""
NO_GRADIENT = ("in full", "CLIPPED", "REJECTED", "MASKED: certain", "MASKED: off-policy")
"""Words for the values of `clipped`."""


@dataclass(frozen=True, slots=True)
class TrainSignals:
    """Per-token facts that training adds to an episode, each [n] over the episode's tokens, NaN where untrained.

    `weight` is the effective gradient weight −∂L/∂log p of the policy term (zero where clipped).
    """

    advantage: Float32
    logp_train: Float32
    """log-prob before the first optimizer step."""
    ratio: Float32
    clipped: Int8
    """0, 1 if the ratio was clipped, REJECTED, MASKED or FAR."""
    weight: Float32
    logp_ref: Float32 | None = None
    value: Float32 | None = None
    returns: Float32 | None = None
    logp_teacher: Float32 | None = None
    """log-prob under the teacher of a distillation."""
    reward_advantage: Float32 | None = None
    """The advantage by the reward alone, beside a teacher's advantage; unweighted."""

    @property
    def push(self) -> Float32:
        """[n] float32: weight × (1 − p), NaN where untrained; by this much a step moves the sampled token's own logit.

        The gradient of log softmax for the sampled token's logit is 1 − p, so a token that was certain is hardly moved
        whatever its advantage. p is the probability before the first optimizer step.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(self.weight * -np.expm1(np.minimum(self.logp_train, 0)), np.float32)
