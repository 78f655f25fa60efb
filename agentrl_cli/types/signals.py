"""What training adds to the tokens of an episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]


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
    weight: Float32
    logp_ref: Float32 | None = None
    value: Float32 | None = None
    returns: Float32 | None = None
