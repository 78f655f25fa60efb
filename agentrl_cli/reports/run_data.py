"""A training as its store has it: steps, groups, running episodes, log; for the watch screen and the checks.

It is read again and again while it goes on: each time only the new rows.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrl_cli.reports.compare import METRICS, series, stored_name
from agentrl_cli.reports.diagnosis import Finding, diagnose, stages
from agentrl_cli.reports.read_evidence import read_evidence
from agentrl_cli.reports.reference import Reference, get_setting
from agentrl_cli.store import EpisodeRow, EvalRow, LiveRow, RunRow, Store, WorkerRow
from agentrl_cli.store.journal import WAITING
from agentrl_cli.types import Fact, group_pairs, kind_of

Series = list[tuple[float, float]]
"""(step, value) of a metric."""
HIDDEN = frozenset({"step", "at"})
SILENT = 10.0
"""Seconds after which the time of a worker's last sign of life is shown."""
SAME = 1e-8
"""Spread of rewards below which they are equal."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The attempts at one task in one step."""

    step: int
    task_id: str
    rewards: tuple[float, ...]
    solved: int
    dispositions: tuple[str, ...]
    flags: tuple[str, ...]
    best: str
    """The id of the episode to open."""

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards: a group without spread teaches nothing."""
        return statistics.pstdev(self.rewards) if self.rewards else 0.0

    @property
    def kind(self) -> str:
        """Why a group of several graded attempts teaches nothing: `all solved`, …; empty if it does."""
        if len(self.rewards) < 2 or self.spread >= SAME:
            return ""
        if self.solved == len(self.rewards):
            return "all solved"
        return "equal rewards" if self.solved else "all failed"


def count_kinds(groups: Sequence[GroupRow]) -> str:
    """Return why groups teach nothing: `3 all solved, 2 all failed`."""
    kinds = Counter(group.kind for group in groups)
    names = ("all solved", "all failed", "equal rewards")
    return ", ".join(f"{kinds[name]} {name}" for name in names if kinds[name])


def group_rows(rows: Iterable[EpisodeRow]) -> tuple[GroupRow, ...]:
    """Return episodes by step and group."""
    groups = group_pairs(((row.step or 0, row.group_id or row.task_id), row) for row in rows)
    return tuple(_group(step, members) for (step, _), members in groups.items())


def _group(step: int, rows: Sequence[EpisodeRow]) -> GroupRow:
    graded = graded_rows(rows)
    best = max(graded, key=lambda row: row.reward or 0.0, default=rows[0])
    facts = Counter(kind_of(row.fact) for row in rows if row.fact).most_common()
    flags = Counter(flag for row in rows for flag in row.flags).most_common(3)
    return GroupRow(
        step,
        rows[0].task_id,
        tuple(row.reward or 0.0 for row in sorted(graded, key=lambda row: row.sample)),
        sum(str(row.outcome) == "solved" for row in rows),
        tuple(name for name, _ in facts),
        tuple(name for name, _ in flags),
        best.id,
    )


def graded_rows(rows: Iterable[EpisodeRow]) -> list[EpisodeRow]:
    """Return the episodes with a reward that were not ended by a fault."""
    return [
        row for row in rows if row.reward is not None and not (row.outcome and row.outcome.is_error)
    ]


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as it is now."""

    run: RunRow
    steps: tuple[Mapping[str, Any], ...] = ()
    evals: tuple[EvalRow, ...] = ()
    live: tuple[LiveRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    """The workers that make its episodes, if not the process of the run."""
    logs: tuple[Mapping[str, Any], ...] = ()
    alerts: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    checkpoints: tuple[Any, ...] = ()
    notable: tuple[tuple[str, EpisodeRow], ...] = ()
    """(why, episode) of the last finished step."""
    advantages: tuple[float, ...] = ()
    """Advantages of the episodes of the last finished step."""
    groups: tuple[GroupRow, ...] = ()
    """The groups of that step."""
    flags: tuple[tuple[str, int], ...] = ()
    """How many of them carry each flag, the most frequent first."""
    done: int = 0
    """Finished episodes of the current step."""
    wanted: int = 0
    """Episodes of a step, 0 if the configuration does not define it."""
    pending: tuple[str, ...] = ()
    """Controls that the trainer has not taken yet."""
    read: float = 0.0
    episodes: int = 0
    """Stored episodes of this run."""
    bytes: int = 0
    """Size of the store, its log included."""
    free: int = 0
    """Bytes left on its disk."""
    health: tuple[Finding, ...] = ()
    """The walk of the diagnosis: a line for each stage."""
    reference: Reference | None = None
    """The curves that its pack has of such a training."""

    @property
    def paused(self) -> bool:
        """Whether the run is alive and the last of its pauses, resumes and starts is a pause."""
        known = ("control:pause", "control:resume", "resumed")
        kinds = [str(event["kind"]) for event in self.events if str(event["kind"]) in known]
        return self.run.alive and bool(kinds) and kinds[-1] == "control:pause"

    @property
    def waits(self) -> tuple[str, ...]:
        """The things that the run waits for as it last said, the oldest first."""
        said = (
            event["data"]["lines"] for event in reversed(self.events) if event["kind"] == WAITING
        )
        return tuple(next(said, ())) if self.run.alive else ()

    @property
    def silent(self) -> tuple[float, ...]:
        """Seconds since each worker's last sign of life, 0 if it is recent or the run has ended."""
        least = SILENT if self.workers and self.run.alive else math.inf
        ages = (self.read - worker.at for worker in self.workers)
        return tuple(age if age > least else 0.0 for age in ages)

    @property
    def evaluating(self) -> bool:
        """Whether the running episodes are those of an evaluation."""
        return bool(self.live) and all(row.kind == "eval" for row in self.live)

    @property
    def has_reference(self) -> bool:
        """Whether the KL is to a reference model."""
        weight: object = get_setting(self.run.config, "algo.kl.coef")
        return bool(self.series("kl")) and weight != 0

    def band(self, name: str) -> list[Series]:
        """Return the lower and the upper edge of the pack's reference curves of a metric; none without a reference."""
        band = self.reference.band(name)[: self.step] if self.reference is not None else []
        return [[(n, pair[edge]) for n, pair in enumerate(band, 1)] for edge in (0, 1) if band]

    @property
    def step(self) -> int:
        """The last finished step."""
        return int(self.steps[-1]["step"]) if self.steps else self.run.step

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return the (step, value) pairs of a metric by its short or stored name, without NaN and missing ones."""
        return series(self.steps, self.key(name))

    def key(self, name: str) -> str:
        """Return the stored name of a short one."""
        return stored_name(self.steps[-3:], name)

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric."""
        series = self.series(name)
        return series[-1][1] if series else None

    def names(self) -> list[str]:
        """Return all metrics of the run, the curated ones first."""
        known = [name for name in METRICS if self.series(name)]
        shown = {self.key(name) for name in known} | HIDDEN
        every = {
            name
            for row in self.steps
            for name, value in row.items()
            if isinstance(value, (int, float))
        }
        return known + sorted(every - shown)

    def seconds_per_step(self) -> float | None:
        """Return the median wall seconds of the last ten steps: a pause or one slow step does not move it."""
        stamps = [float(row["at"]) for row in self.steps[-11:] if row.get("at")]
        took = [later - earlier for earlier, later in pairwise(stamps)]
        return statistics.median(took) if took else self.last("seconds")

    def usual(self, stored: str) -> float:
        """Return the median of a stored metric over the last ten steps, 0 if absent."""
        values = [
            float(row[stored])
            for row in self.steps[-10:]
            if isinstance(row.get(stored), (int, float))
        ]
        return statistics.median(values) if values else 0.0

    def eta(self) -> float | None:
        """Return the seconds until the last step at the current pace."""
        pace, total = self.seconds_per_step(), self.run.total_steps
        return pace * max(total - self.step, 0) if pace is not None and total else None

    def reward_parts(self) -> list[tuple[str, float]]:
        """Return (name, mean) of the last step's reward parts: metrics `rewards/<name>/mean` or `rewards/<name>`."""
        if not self.steps:
            return []
        return [
            (name.removeprefix("rewards/").removesuffix("/mean"), float(value))
            for name, value in self.steps[-1].items()
            if name.startswith("rewards/")
            and not name.endswith("/std")
            and isinstance(value, (int, float))
        ]


def load(store: Store, run_id: str, before: RunData | None = None) -> RunData:
    """Reads a run; given the last reading, only newer steps, logs, alerts and events."""
    run = store.runs.get(run_id)
    old = before if before is not None and before.run.id == run.id else RunData(run)
    # the newest step is read again: its evaluation is added to it only later
    last = int(old.steps[-1]["step"]) if old.steps else 0
    kept = tuple(row for row in old.steps if row["step"] < last)
    steps = kept + tuple(store.runs.steps(run.id, last))
    rollout: Any = run.config.get("rollout") or {}
    data = RunData(
        run=run,
        steps=steps,
        evals=tuple(store.runs.evals(run.id)),
        live=tuple(store.live.all(run.id)),
        workers=tuple(store.workers.all(run.id)),
        logs=_tail(old.logs, lambda since: store.journal.logs(run.id, since), 400),
        alerts=tuple(_describe_alerts(row) for row in store.journal.folded_alerts(run.id)),
        events=_tail(old.events, lambda since: store.journal.events(run.id, since), 1000),
        checkpoints=tuple(store.runs.checkpoints(run.id)),
        wanted=int(rollout.get("group_size", 0)) * int(rollout.get("prompts_per_step", 0)),
        pending=tuple(row.action for row in store.controls.all(run.id) if row.taken is None),
        read=time.time(),
    )
    done = 0
    if run.alive and data.live:
        which = f"step:{data.step} kind:eval"
        if not data.evaluating:
            newest = store.episodes.used("kind:train", "-time", run.id, limit=1)
            which = f"step:{newest[0].step or 0 if newest else 0} kind:train"
        done = len(store.episodes.used(which, "time", run.id)) - len(data.live)
    here = data.step, run.status, len(data.evals)
    if old.notable and (old.step, old.run.status, len(old.evals)) == here:
        same: dict[str, Any] = {name: getattr(old, name) for name in PER_STEP}
    else:
        same = {**notable_of(store, run.id, data.step), **_sizes(store, run.id)}
        evidence = read_evidence(store, run, steps, ends=1, free=same["free"])
        same |= {"health": tuple(stages(diagnose(evidence))), "reference": evidence.reference}
    return replace(data, done=max(done, 0), **same)


def newer(store: Store, run_id: str) -> str:
    """Return the id of a training that runs now and began after a run that has ended; without one, the run's own."""
    run = store.runs.get(run_id)
    if not run.alive:
        for row in store.runs.all():
            if row.kind == "train" and row.started > run.started and row.alive:
                return row.id
    return run.id


def _sizes(store: Store, run_id: str) -> dict[str, int]:
    """Return the number of episodes of the run, the bytes of the store, and the bytes left on its disk."""
    path = Path(store.path)
    files = [file for file in (path, path.with_name(f"{path.name}-wal")) if file.exists()]
    return {
        "episodes": store.stats.episodes(run_id).get(run_id, 0),
        "bytes": sum(file.stat().st_size for file in files),
        "free": shutil.disk_usage(path.parent).free,
    }


def _tail(old: Sequence[Mapping[str, Any]], read: Any, keep: int) -> tuple[Mapping[str, Any], ...]:
    return (*old, *read(int(old[-1]["id"]) if old else 0))[-keep:]


def _describe_alerts(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe alerts of one kind in one line of a log: how often, from which step to which, and the newest text."""
    if row["count"] == 1:
        return {**row, "at": row["last"]}
    first, last = row["first_step"], row["last_step"]
    steps = f", steps {first} to {last}" if first is not None and last is not None else ""
    return {**row, "at": row["last"], "text": f"{row['count']}×{steps}: {row['text']}"}


PER_STEP = ("notable", "advantages", "flags", "groups", "episodes", "bytes", "free", "health",
            "reference")  # fmt: skip
"""Read again after a step, an evaluation, and the end of the run."""


def sort_by_rarity(rows: Sequence[EpisodeRow]) -> list[EpisodeRow]:
    """Return the episodes with flags, the rarest first: by the sum of −log of each flag's share."""
    counts = Counter(flag for row in rows for flag in set(row.flags))

    def rarity(row: EpisodeRow) -> tuple[float, str]:
        return sum(-math.log(counts[flag] / len(rows)) for flag in set(row.flags)), row.id

    return sorted((row for row in rows if row.flags), key=rarity, reverse=True)


def notable_of(store: Store, run_id: str, step: int) -> dict[str, Any]:
    """Return a step's `notable` episodes (best, worst, odd, erring), `advantages`, `flags` counted, `groups`."""
    rows = store.episodes.used(f"step:{step} kind:train", "-reward", run_id)
    graded = graded_rows(rows)
    best = max(graded, key=lambda row: row.reward or 0.0, default=None)
    # the worst is another one even if all are equal
    others = [row for row in graded if row is not best]
    kinds = (
        ("best", [best] if best is not None else []),
        ("worst", sorted(others, key=lambda row: row.reward or 0.0)),
        ("odd", sort_by_rarity(rows)),
        ("error", [row for row in rows if row.outcome and row.outcome.is_error]),
    )
    notable: dict[str, tuple[str, EpisodeRow]] = {}
    for why, found in kinds:
        fresh = [row for row in found if row.id not in notable]
        notable |= {row.id: (why, row) for row in fresh[:1]}
    return {
        "notable": tuple(notable.values()),
        # a group without spread has no advantages stored: each of them would be zero
        "advantages": tuple(
            row.advantage or 0.0
            for row in rows
            if row.advantage is not None or row.fact == Fact.SKIPPED_ZERO_VARIANCE
        ),
        "flags": tuple(Counter(flag for row in rows for flag in row.flags).most_common()),
        "groups": group_rows(graded),
    }
