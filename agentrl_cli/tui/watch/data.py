"""A run as the watch screen shows it. Pure; no textual."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from agentrl_cli.reports.compare import METRICS
from agentrl_cli.tui.common.charts import short

if TYPE_CHECKING:
    from agentrl_cli.store import EpisodeRow, EvalRow, LiveRow, RunRow, WorkerRow

HIDDEN = frozenset({"step", "at"})


@dataclass(frozen=True, slots=True)
class Health:
    """One rule over the stored numbers."""

    level: str
    """ok | warn | bad | done"""
    name: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Signal:
    """The groups of a step by what they teach: a group whose rewards are all equal has no advantages."""

    groups: int = 0
    solved: int = 0
    """Without spread, every attempt solved."""
    failed: int = 0
    """Without spread, no attempt solved."""
    equal: int = 0
    """Without spread otherwise."""

    def text(self) -> str:
        """`5 of 8 groups teach nothing: 3 all solved, 2 all failed`."""
        names = (
            ("all solved", self.solved),
            ("all failed", self.failed),
            ("equal rewards", self.equal),
        )
        parts = ", ".join(f"{count} {name}" for name, count in names if count)
        flat = self.solved + self.failed + self.equal
        return f"{flat} of {self.groups} groups teach nothing" + (f": {parts}" if parts else "")


@dataclass(frozen=True, slots=True)
class WatchData:
    """A run as it is now."""

    run: RunRow
    steps: tuple[Mapping[str, Any], ...] = ()
    evals: tuple[EvalRow, ...] = ()
    live: tuple[LiveRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    """What makes its episodes, if not the process of the run."""
    logs: tuple[Mapping[str, Any], ...] = ()
    alerts: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    checkpoints: tuple[Any, ...] = ()
    notable: tuple[tuple[str, EpisodeRow], ...] = ()
    """(why, episode) of the last finished step."""
    advantages: tuple[float, ...] = ()
    """Advantages of the episodes of the last finished step."""
    signal: Signal = Signal()
    """Signal of that step's groups."""
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
    health: tuple[Health, ...] = ()

    @property
    def paused(self) -> bool:
        """Whether the run is alive and the last of its pauses, resumes and starts is a pause."""
        known = ("control:pause", "control:resume", "resumed")
        kinds = [str(event["kind"]) for event in self.events if str(event["kind"]) in known]
        return self.run.alive and bool(kinds) and kinds[-1] == "control:pause"

    @property
    def evaluating(self) -> bool:
        """Whether the running episodes are those of an evaluation."""
        return bool(self.live) and all(row.kind == "eval" for row in self.live)

    @property
    def has_reference(self) -> bool:
        """Whether the KL is to a reference model."""
        algo = self.run.config.get("algo")
        coefficient = algo.get("kl_coef") if isinstance(algo, Mapping) else None
        return bool(self.series("kl")) and coefficient != 0

    @property
    def step(self) -> int:
        """The last finished step."""
        return int(self.steps[-1]["step"]) if self.steps else self.run.step

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric by its short or stored name; NaN and missing values are left out."""
        key = self.key(name)
        out = []
        for row in self.steps:
            value = row.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                out.append((float(row["step"]), float(value)))
        return out

    def key(self, name: str) -> str:
        """Return the stored name of a short one."""
        names = METRICS.get(name, (name,))
        return next((n for n in names if any(n in row for row in self.steps[-3:])), names[0])

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric."""
        series = self.series(name)
        return series[-1][1] if series else None

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the last step, or as configured before the first one."""
        train = self.run.config.get("train")
        configured = float(train["lr"]) if isinstance(train, Mapping) and "lr" in train else None
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
        """Median wall seconds of the last ten steps: a pause or one slow step does not move it."""
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
        """Seconds until the last step at the current pace."""
        pace, total = self.seconds_per_step(), self.run.total_steps
        return pace * max(total - self.step, 0) if pace is not None and total else None

    def reward_parts(self) -> list[tuple[str, float]]:
        """(name, mean) of the reward parts in the last step: metrics `rewards/<name>/mean` or `rewards/<name>`."""
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


def step_line(row: Mapping[str, Any]) -> str:
    """`step 12  14:03:11  reward 0.412  loss …`: a step's metrics in one line, the curated ones first."""
    parts = [f"step {row['step']}"]
    if row.get("at"):
        parts.append(time.strftime("%H:%M:%S", time.localtime(float(row["at"]))))
    for name, stored in METRICS.items():
        value = next((row[key] for key in stored if isinstance(row.get(key), (int, float))), None)
        if value is not None:
            parts.append(f"{name} {short(float(value))}")
    return "  ".join(parts)


def metrics_csv(data: WatchData) -> str:
    """Return every metric of every step, a row each."""
    names = list(dict.fromkeys(name for row in data.steps for name in row))
    lines = [",".join(names)]
    lines += [
        ",".join("" if row.get(name) is None else str(row[name]) for name in names)
        for row in data.steps
    ]
    return "\n".join(lines) + "\n"
