"""Whether groups will differ in their rewards, estimated from a few rollouts before a training.

A group whose episodes all get the same reward has no advantage to learn from. The chance that a group of G has solved
and unsolved episodes is 1 - E[p^G] - E[(1 - p)^G], p being the share of a task's attempts that solve it; its
distribution is a Beta with the task's own counts and a prior of PRIOR attempts at the mean of all tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_cli.learning.dispositions import SAME
from agentrl_cli.types import Episode, group_pairs

ATTEMPTS = 4
"""At each task of an estimate."""
PRIOR = 2.0
FEW = 0.25
"""Share of groups with spread below which a training is slow to begin."""


@dataclass(frozen=True, slots=True)
class Spread:
    """An estimate of a training's groups from some rollouts."""

    tasks: int
    rollouts: int
    """Graded ones."""
    ungraded: int
    solved: int
    differing: int
    """Tasks whose rollouts had different rewards, by any part."""
    group_size: int
    chance: float
    """Estimated share of groups with solved and unsolved episodes."""

    @property
    def verdict(self) -> str:
        """One of: ready, slow, parts, unsolved, done, ungraded."""
        if not self.rollouts:
            return "ungraded"
        if self.solved == self.rollouts:
            return "done"
        if not self.solved:
            return "parts" if self.differing else "unsolved"
        return "ready" if self.chance >= FEW else "slow"


def estimate(episodes: Sequence[Episode], group_size: int) -> Spread:
    """Return the estimate from several attempts at each of some tasks."""
    graded = [episode for episode in episodes if episode.graded]
    by_task = group_pairs((episode.task_id, episode) for episode in graded)
    solved = sum(episode.solved for episode in graded)
    mean = (solved + 0.5) / (len(graded) + 1)
    counts = [(sum(episode.solved for episode in group), len(group)) for group in by_task.values()]
    chances = [
        _chance_of_both(won + PRIOR * mean, n - won + PRIOR * (1 - mean), group_size)
        for won, n in counts
    ]
    rewards = [[episode.graded_reward for episode in group] for group in by_task.values()]
    return Spread(
        tasks=len(by_task),
        rollouts=len(graded),
        ungraded=len(episodes) - len(graded),
        solved=solved,
        differing=sum(max(group) - min(group) > SAME for group in rewards),
        group_size=group_size,
        chance=sum(chances) / len(chances) if chances else 0.0,
    )


def _chance_of_both(a: float, b: float, size: int) -> float:
    """1 - E[p^size] - E[(1-p)^size] for p from Beta(a, b)."""

    def moment(x: float, y: float) -> float:
        return math.exp(
            math.lgamma(x + size) + math.lgamma(x + y) - math.lgamma(x) - math.lgamma(x + y + size)
        )

    return max(0.0, 1.0 - moment(a, b) - moment(b, a))


def summary(found: Spread) -> str:
    """Return the meaning of the estimate for a training."""
    groups = f"about {found.chance:.0%} of groups of {found.group_size} will have solved and unsolved episodes"
    return {
        "ready": f"{groups}: a training can begin",
        "slow": f"only {groups}: a training begins slowly, or not at all",
        "parts": f"rewards differ in {found.differing} of {found.tasks} tasks, but none is solved: a training would"
        " raise what differs, and perhaps nothing leads it to a solution",
        "unsolved": "no group would have a solved episode to learn from: a training would do nothing",
        "done": "nothing is left to learn on these rows",
        "ungraded": "no rollout could be graded; `agentrl replay last` shows the last one",
    }[found.verdict]
