"""Reward parts that depend on an episode's length: overlong shaping and a length penalty.

They are parts like any other: stored with their weight, shown in replay, and summed into the reward that advantages are
relative to. Evaluations do not have them. dispositions.py decides which are skipped instead of penalised.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

from agentrl_cli.config import AlgoConfig, RolloutConfig
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

    def __init__(
        self,
        algo: AlgoConfig,
        rollout: RolloutConfig,
        context: int,
        agents: Collection[str] = (),
    ) -> None:
        """`context`: positions of the policy's context, which may be fewer than `rollout.max_tokens`.

        `agents`: the packs that agents play, to whom `rollout.response_tokens` does not apply.
        """
        self.agents = agents
        self.terms = algo.length_penalty
        self.rollout = rollout
        self.context = context

    def on_rollout_end(self, rollout: Episode, task: Task) -> list[RewardPart]:
        """`overlong` and `length_penalty`, if they have a weight; both are 0 or less. The longest sequence counts."""
        parts = []
        terms, limits, longest = self.terms, self.rollout, max(rollout.sequences, key=len)
        limit, buffer = min(limits.max_tokens, self.context), terms.buffer
        if limits.response_tokens is not None and task.pack not in self.agents:
            turns = [rollout.turns[number] for number in longest.turns]
            asked = takewhile(lambda turn: turn.role != "assistant", turns)
            limit = min(
                limit, sum(turn.end - turn.start for turn in asked) + limits.response_tokens
            )
            buffer = min(buffer, limits.response_tokens)
        if terms.overlong:
            cut = any(turn.stop_reason is StopReason.LENGTH for turn in rollout.turns)
            value = -1.0 if cut else overlong(len(longest), limit, min(buffer, limit))
            text = f"{len(longest)} of {limit} tokens" + ", a turn was cut" * cut
            parts.append(RewardPart("overlong", value, terms.overlong, detail=text))
        if terms.coef:
            sampled = rollout.trained_tokens
            text = f"{sampled} sampled tokens, limit {limits.max_tokens}"
            value = -sampled / limits.max_tokens
            parts.append(RewardPart("length_penalty", value, terms.coef, detail=text))
        return parts
