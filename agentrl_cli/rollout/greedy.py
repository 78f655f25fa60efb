"""ReMax's baseline: one greedy attempt at each task of a step, evaluated and stored, never trained.

They are episodes of kind `baseline` in the group NAME-greedy, with the disposition `skipped:unused`. Like a step's
other episodes they are a function of weights, task and seed, and a resume takes the finished ones from the store.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl_cli.learning.estimator_inputs import turn_rewards
from agentrl_cli.rollout import Job, Rollout, seed_of
from agentrl_cli.rollout.recorder import load_finished
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Fact, Task

KIND, SUFFIX = "baseline", "-greedy"
"""Kind of the greedy attempts, and the end of their group's name."""


class Greedy:
    """Greedy attempts beside the sampled ones of a run, with the same policy, tools and rewards."""

    def __init__(self, seed: int, run: RunRow, store: Store, rollout: Rollout) -> None:
        self.seed = seed
        self.run = run
        self.store = store
        self.rollout = rollout.with_(temperature=0.0)

    async def attempts(
        self, groups: Sequence[Sequence[Episode]], tasks: Sequence[Task], step: int
    ) -> dict[str, Episode]:
        """Group id → the greedy attempt at the group's task. `step` counts from 0."""
        by_id = {(task.pack, task.id): task for task in tasks}
        jobs: dict[str, Job] = {}
        for group in groups:
            first = group[0]
            name = first.group_id or ""
            seed = seed_of(self.seed, "greedy", step, name)
            task = by_id[first.pack, first.task_id]
            jobs[name] = Job(task, seed, 0, name + SUFFIX, step + 1, self.run.id, KIND, len(jobs))
        stored, _ = load_finished(self.store, list(jobs.values()))
        missing = [job for job in jobs.values() if (job.group_id, 0) not in stored]
        done = {episode.group_id: episode for episode in stored.values()}
        done |= {episode.group_id: episode for episode in await self.rollout.run(missing)}
        self.store.marks.set_facts(
            (episode.id, str(Fact.SKIPPED_BASELINE), None) for episode in done.values()
        )
        return {name: done[job.group_id] for name, job in jobs.items()}


def rewards(attempts: dict[str, Episode]) -> dict[str, float]:
    """Group id → what its greedy attempt earned, rewards of single turns included, of those that could be graded."""
    graded = {name: e for name, e in attempts.items() if e.outcome is not None and e.graded}
    return {name: e.graded_reward + float(np.nansum(turn_rewards(e))) for name, e in graded.items()}
