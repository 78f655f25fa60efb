"""A training as its store has it: steps, groups, running episodes, log; read by the watch screen and the checks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agentrl_cli.reports.compare import METRICS, series, stored_name
from agentrl_cli.reports.diagnosis import Finding
from agentrl_cli.reports.reference import EVENT, get_setting, parse_reference
from agentrl_cli.store import EpisodeRow, EvalRow, LiveRow, RunRow, WorkerRow
from agentrl_cli.store.journal import WAITING
from agentrl_cli.types import kind_of

Series = list[tuple[float, float]]
"""(step, value) of a metric."""
HIDDEN = frozenset({"step", "at"})
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
    groups: dict[tuple[int, str], list[EpisodeRow]] = {}
    for row in rows:
        groups.setdefault((row.step or 0, row.group_id or row.task_id), []).append(row)
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
        found = (event["data"] for event in self.events if event["kind"] == EVENT)
        kept: Mapping[str, Any] = next(found, {"curves": ()})
        band = parse_reference(kept).band(name)[: self.step] if name in kept["curves"] else []
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

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the last step, or as configured before the first one."""
        configured: float | None = get_setting(self.run.config, "train.lr")
        last = self.last("lr")
        return configured if last is None else last

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
        out = []
        for name, value in self.steps[-1].items():
            if (
                name.startswith("rewards/")
                and not name.endswith("/std")
                and isinstance(value, (int, float))
            ):
                out.append((name.removeprefix("rewards/").removesuffix("/mean"), float(value)))
        return out
