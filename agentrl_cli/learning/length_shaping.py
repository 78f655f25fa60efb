"""Reward parts that depend on an episode's length: overlong shaping and a length penalty.

They are parts like any other: stored with their weight, shown in replay, and summed into the reward that advantages are
relative to. Evaluations do not have them. dispositions.py decides which are skipped instead of penalised.
"""

from __future__ import annotations

from agentrl_cli.config import AlgoConfig
from agentrl_cli.hooks import Hook
from agentrl_cli.types import Episode, RewardPart, StopReason, Task


def overlong(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft punishment in [-1, 0] (https://arxiv.org/abs/2503.14476 eq. 13).

    0 up to `limit − buffer` tokens, then falling linearly to −1 at `limit`.
    """
    start = limit - buffer
    return 0.0 if length <= start else max(-1.0, (start - length) / buffer)


class Shaping(Hook):
    """Adds the parts that the configuration asks for to the episodes of a training."""

    def __init__(self, algo: AlgoConfig, limit: int) -> None:
        """`limit`: `rollout.max_tokens`."""
        self.algo = algo
        self.limit = limit

    def on_rollout_end(self, rollout: Episode, task: Task) -> list[RewardPart]:
        """`overlong` and `length`, if they have a weight; both are 0 or less. The longest sequence counts."""
        parts = []
        algo, length = self.algo, max(len(branch) for branch in rollout.sequences)
        if algo.length_penalty.overlong:
            cut = any(turn.stop_reason is StopReason.LENGTH for turn in rollout.turns)
            value = (
                -1.0
                if cut
                else overlong(length, self.limit, min(algo.length_penalty.buffer, self.limit))
            )
            text = f"{length} of {self.limit} tokens" + ", a turn was cut" * cut
            parts.append(RewardPart("overlong", value, algo.length_penalty.overlong, detail=text))
        if algo.length_penalty.coef:
            sampled = rollout.trained_tokens
            text = f"{sampled} sampled tokens, limit {self.limit}"
            parts.append(
                RewardPart(
                    "length_penalty", -sampled / self.limit, algo.length_penalty.coef, detail=text
                )
            )
        return parts
