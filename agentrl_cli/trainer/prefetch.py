"""Prefetching: the episodes of later steps are sampled while a step is awaited and trained on.

With a staleness of N the steps `now` to `now + N` may be sampled at once, so no token is more than N updates older
than the update it is trained in. N = 0 is the synchronous algorithm: sample, train, sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

import numpy as np

from agentrl_cli.config.records import TrainerSettings
from agentrl_cli.types import Episode

Groups = list[list[Episode]]
T = TypeVar("T")


class Prefetcher:
    """The groups of steps, in order. `stop` it: running episodes are cancelled, and stored as that."""

    def __init__(self, sample: Callable[[int], Awaitable[Groups]], config: TrainerSettings) -> None:
        """`sample` samples one step, counted from 0."""
        self.sample = sample
        self.config = config
        self.staleness = config.rollout.async_staleness
        self._running: dict[int, asyncio.Task[Groups]] = {}

    async def take(self, step: int) -> Groups:
        """Return the groups of a step. Raises what its sampling raised."""
        if not self.staleness:
            return await self.sample(step)
        last = min(step + self.staleness, self.config.train.steps - 1)
        for number in range(step, max(step, last) + 1):
            if number not in self._running:
                self._running[number] = asyncio.ensure_future(self.sample(number))
        groups = await self._running[step]
        del self._running[step]
        return groups

    async def stop(self) -> None:
        """Cancel the prefetched step and wait until it has ended."""
        running = list(self._running.values())
        self._running.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread, so that episodes continue meanwhile. Not cancellable: a cancellation waits for it."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def ages(episode: Episode, names: Collection[str], step: int) -> list[int]:
    """Updates between the weights that sampled each assistant turn and those of a step, counted from 0.

    Versions are named RUN@STEP, or RUN@STEP-healed; any other name is that of the weights that the run started from.
    `names`: the run's.
    """
    return [step - (number or 0) for number in _versions(episode, names)]


def stale(
    groups: Sequence[Sequence[Episode]], names: Collection[str], step: int, staleness: int
) -> set[str]:
    """Ids of the episodes with a turn older than allowed, for instance after the bound was lowered for a resume."""
    return {
        e.id
        for group in groups
        for e in group
        if any(n is not None and step - n > staleness for n in _versions(e, names))
    }


def _versions(episode: Episode, names: Collection[str]) -> list[int | None]:
    """Return the step of the weights that sampled each assistant turn; None if they are not of this run."""
    found = [t.weights_version.rpartition("@") for t in episode.turns if t.role == "assistant"]
    steps = [(name, number.removesuffix("-healed")) for name, _, number in found]
    return [int(number) if name in names and number.isdigit() else None for name, number in steps]


def age_metrics(
    groups: Sequence[Sequence[Episode]], names: Collection[str], step: int
) -> dict[str, float]:
    """Mean and most updates between sampling and training, over turns, and episodes that have several versions."""
    found = [ages(episode, names, step) for group in groups for episode in group]
    turns = [age for episode in found for age in episode]
    if not turns:
        return {}
    return {
        "staleness/mean": float(np.mean(turns)),
        "staleness/max": float(max(turns)),
        "staleness/overtaken": float(sum(len(set(episode)) > 1 for episode in found)),
    }
