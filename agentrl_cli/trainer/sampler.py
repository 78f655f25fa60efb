"""The groups of a training step: the order of the tasks, those in the store, those to sample.

Everything is a function of the seed, the step and what earlier steps and rounds left in the store, so a resume that
walks through the same steps picks the same tasks. The reason for a group out of turn is stored with it (`groups.why`)
and shown by `agentrl show` and replay. learning/dispositions.py decides which are trained and which skipped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from agentrl_cli.chat.drift import KINDS
from agentrl_cli.config import TaskConfig
from agentrl_cli.config.records import TrainerSettings
from agentrl_cli.errors import ConfigError, pluralise
from agentrl_cli.evaluate import pick_tasks
from agentrl_cli.learning.advantages import drops_equal, has_signal
from agentrl_cli.learning.dispositions import decide
from agentrl_cli.rollout import Job, Rollout, seed_of
from agentrl_cli.rollout.greedy import SUFFIX
from agentrl_cli.rollout.recorder import load_finished
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.marks import RETIRED
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode, Fact, Task, group_pairs

FADE = 0.5
"""Weight of a task's attempts against those of its next visit: the policy has changed since."""
FLOOR = 0.01
"""Least weight of a task in the curriculum: tasks solved always, or never, are still attempted now and then."""
HARD, EASY = 1 / 3, 2 / 3
"""Solve rates below and above which a task counts as hard and as easy."""


@dataclass(frozen=True, slots=True)
class Record:
    """How often a task was solved so far, its earlier visits faded."""

    solved: float = 0.0
    tried: float = 0.0

    @property
    def rate(self) -> float:
        """Estimated solve rate, from a prior of one solved and one failed attempt."""
        return (self.solved + 1) / (self.tried + 2)

    @property
    def level(self) -> str:
        """new | hard | medium | easy"""
        if not self.tried:
            return "new"
        share = self.solved / self.tried
        return "hard" if share < HARD else "easy" if share > EASY else "medium"

    def __str__(self) -> str:
        return f"solved {self.solved / self.tried:.0%} lately" if self.tried else "not tried yet"


Pick = tuple[int, str]
"""(index of a task, why it was picked; empty if it was its turn)"""


class Collector:
    """The groups of every step of one run."""

    def __init__(
        self,
        config: TrainerSettings,
        run: RunRow,
        tasks: Sequence[Task],
        store: Store,
        rollout: Rollout,
        vocabulary: int | None = None,
        narrate: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`vocabulary`: ids that the trained model has a row for; None: any id can be trained."""
        self.config = config
        self.run = run
        self.tasks = tasks
        self.store = store
        self.rollout = rollout
        self.vocabulary = vocabulary
        self.narrate = narrate
        self.rounds: dict[int, int] = {}
        """Rounds of each step, counted from 1: one round without dynamic sampling."""

    async def sample(self, step: int) -> list[list[Episode]]:
        """Return the groups of a step: finished episodes from the store, the rest from the policy.

        With `rollout.resample_rounds` further groups are sampled, at most that many times, while fewer than
        `rollout.prompts_per_step` carry signal (dynamic sampling, https://arxiv.org/abs/2503.14476 section 3.2).
        """
        wanted = self.config.rollout.prompts_per_step
        if not self.rounds:  # the first line of a step is of its end
            count = pluralise(wanted * self.config.rollout.group_size, "episode")
            self.narrate(f"step {step + 1}: sampling {count} …")
        picks = self.ranking(step)
        groups: list[list[Episode]] = []
        missing, rounds = wanted, 0
        while missing and rounds <= self.config.rollout.resample_rounds:
            note = f"sampled again, round {rounds}: {wanted - missing} of {wanted} groups carried signal"
            groups += await self._round(
                step, picks, range(len(groups), len(groups) + missing), note * bool(groups)
            )
            rounds += 1
            missing = wanted - sum(self._has_signal(group) for group in groups)
        self.rounds[step + 1] = rounds
        self._retire_rest(step, groups)
        if rounds > 1:
            self.narrate(
                f"step {step + 1}: {len(groups) - wanted} more groups sampled for {wanted - missing} with signal"
            )
        return groups

    def _retire_rest(self, step: int, groups: Sequence[Sequence[Episode]]) -> None:
        """Take attempts out of a step's groups that an earlier process made for larger groups, or more of them."""
        used = {episode.id for group in groups for episode in group}
        rest: dict[str, list[str]] = {}
        for key, episode_id in self.store.episodes.find_finished(self.run.id, step + 1).items():
            group = key.split("/")[-2]
            if episode_id not in used and RETIRED not in group:
                rest.setdefault(group, []).append(episode_id)
        for group, ids in rest.items():
            self.store.marks.retire(self.run.id, group, ids, Fact.SKIPPED_CUT)
        for group in rest.keys() - {group[0].group_id for group in groups}:
            self.store.marks.retire(self.run.id, group + SUFFIX)

    def metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """What dynamic sampling did in a step; empty if it is off."""
        if not self.config.rollout.resample_rounds:
            return {}
        signal = sum(self._has_signal(group) for group in groups)
        return {
            "groups/sampled": float(len(groups)),
            "groups/signal": float(signal),
            "groups/rounds": float(self.rounds.get(groups[0][0].step or 0, 0)),
        }

    async def _round(
        self, step: int, picks: Sequence[Pick], places: range, note: str
    ) -> list[list[Episode]]:
        jobs = self.jobs(step, picks, places)
        known = self.finished(jobs)
        for place in places:
            index, why = picks[place % len(picks)]
            task, name = self.tasks[index], group_name(step, place)
            if reason := "; ".join(filter(None, (note, why))):
                self.store.episodes.add_group(
                    self.run.id, name, task.id, step + 1, reason, pack=task.pack
                )
        missing = [job for job in jobs if (job.group_id, job.sample) not in known]
        for episode in await self.rollout.run(missing):
            known[episode.group_id, episode.sample] = episode
        found = ((job.group_id or "", known[job.group_id, job.sample]) for job in jobs)
        return list(group_pairs(found).values())

    def dispositions(
        self, groups: Sequence[Sequence[Episode]], stale: Collection[str] = ()
    ) -> dict[str, Fact]:
        """Return the fact of each episode by its id; `stale` are the ids of episodes that are too old."""
        left_out = self.config.algo.skip.groups
        facts = decide(
            groups,
            drift=self.rollout.drift,
            train_drifted=not self.config.algo.skip.drift,
            drop_zero_variance=drops_equal(self.config.algo),
            mask_overlong=self.config.algo.skip.overlong,
            mask_void=self.config.algo.skip.void,
            stale=stale,
            vocabulary=self.vocabulary,
        )
        out = [e.id for group in groups for e in group if e.group_id in left_out]
        return facts | dict.fromkeys(out, Fact.SKIPPED_LEFT_OUT)

    def _has_signal(self, group: Sequence[Episode]) -> bool:
        facts = self.dispositions([group])
        return has_signal(
            self.config.algo, [episode for episode in group if facts[episode.id] is Fact.TRAINED]
        )

    # --- which tasks -------------------------------------------------------------------------------------------------

    def jobs(
        self, step: int, picks: Sequence[Pick] | None = None, places: range | None = None
    ) -> list[Job]:
        """Return the attempts of a step's first round, or of some places in it; steps are stored counted from 1."""
        picks = self.ranking(step) if picks is None else picks
        jobs: list[Job] = []
        for place in places or range(self.config.rollout.prompts_per_step):
            task = self.tasks[picks[place % len(picks)][0]]
            for sample in range(self.config.rollout.group_size):
                seed = seed_of(self.config.seed, "train", step, place, sample)
                jobs.append(
                    Job(
                        task,
                        seed,
                        sample,
                        group_name(step, place),
                        step + 1,
                        self.run.id,
                        "train",
                        len(jobs),
                    )
                )
        return jobs

    def ranking(self, step: int) -> list[Pick]:
        """Return every task in the order in which a step draws them, each with the reason for its place."""
        return ORDERS[self.config.task.order](self, step)

    def records(self, step: int) -> list[Record]:
        """Return each task's record over the steps before this one, without those that may be
        sampled at the same time.
        """
        found: dict[tuple[str, str], Record] = {}
        until = step - self.config.rollout.async_staleness
        for pack, task, _, solved, tried in self.store.stats.task_results(self.run.id, until):
            old = found.get((pack, task), Record())
            found[pack, task] = Record(FADE * old.solved + solved, FADE * old.tried + tried)
        return [found.get((task.pack, task.id), Record()) for task in self.tasks]

    def finished(self, jobs: Sequence[Job]) -> dict[tuple[str | None, int], Episode]:
        """Return the stored attempts of jobs of a step; other attempts in their places are retired."""
        found, others = load_finished(self.store, jobs)
        for episode in found.values():
            if rows := self.store.marks.drift(episode.id):
                self.rollout.drift[episode.id] = max((row.kind for row in rows), key=KINDS.index)
        for name, ids in others.items():
            self.store.marks.retire(self.run.id, name, ids, Fact.SKIPPED_CUT)
            self.store.marks.retire(self.run.id, name + SUFFIX)
        return found


def group_name(step: int, place: int) -> str:
    """Return the id of the group at a place of a step, unique in its run."""
    return f"{step + 1:06d}-{place:03d}"


def find_tasks(config: TaskConfig, packs: Mapping[str, Pack], store: Store) -> list[Task]:
    """Return the tasks of the training split, at most `task.limit` of each pack, which the store then has.

    Raises ConfigError without any.
    """
    split, limit = config.split_train, config.limit
    found = pick_tasks(packs, [split], families=config.families)
    tasks = [
        task for pack in packs for task in [task for task in found if task.pack == pack][:limit]
    ]
    if not tasks:
        raise ConfigError(f"Split {split!r} has no tasks to train on.")
    store.tasks.add(tasks)
    return tasks


def shuffled(collector: Collector, step: int) -> list[Pick]:
    """Return every task once in an epoch, in a new order each; resampled groups come from the other
    tasks, at random.
    """
    seed, count = collector.config.seed, len(collector.tasks)
    wanted = collector.config.rollout.prompts_per_step
    begin, end = step * wanted, (step + 1) * wanted
    drawn: list[int] = []
    for epoch in range(begin // count, (end - 1) // count + 1):
        order = list(range(count))
        random.Random(seed_of(seed, "order", epoch)).shuffle(order)
        drawn += order
    first = drawn[begin % count :][:wanted]
    rest = sorted(set(range(count)).difference(first)) or list(range(count))
    random.Random(seed_of(seed, "more", step)).shuffle(rest)
    return [(task, "") for task in (*first, *rest)]


def curriculum(collector: Collector, step: int) -> list[Pick]:
    """Drawn by p·(1 − p) of each task's solve rate p: the variance of a reward of 0 or 1.

    https://arxiv.org/abs/2502.12272. Without replacement, by the keys of Efraimidis and Spirakis (2006).
    """
    rng = random.Random(seed_of(collector.config.seed, "curriculum", step))
    records = collector.records(step)
    keys = [rng.random() ** (1 / max(r.rate * (1 - r.rate), FLOOR)) for r in records]
    order = sorted(range(len(keys)), key=lambda task: -keys[task])
    return [(task, f"curriculum: {records[task]}") for task in order]


def balanced(collector: Collector, step: int) -> list[Pick]:
    """One task of each difficulty in turn (new, hard, medium, easy, if there are any), each at random."""
    rng = random.Random(seed_of(collector.config.seed, "balanced", step))
    records = collector.records(step)
    order = list(range(len(records)))
    rng.shuffle(order)
    levels = group_pairs((records[task].level, task) for task in order)
    queues = [levels[name] for name in ("medium", "hard", "easy", "new") if name in levels]
    turns = [queue[n] for n in range(len(order)) for queue in queues if n < len(queue)]
    return [(task, f"balanced: {records[task].level}, {records[task]}") for task in turns]


ORDERS: Mapping[str, Callable[[Collector, int], list[Pick]]] = {
    "shuffle": shuffled,
    "curriculum": curriculum,
    "balanced": balanced,
}
