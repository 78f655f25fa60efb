"""The evidence of a diagnosis: steps, evaluations and some episodes of a training. Pure: read_evidence.py reads.

A training that falls far below its own best breaks everything else as well: calls, lengths, groups. So the rules about
the set-up see the steps before the fall (`Evidence.before`), and those about the optimizer see it all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, variance
from typing import Any

from agentrl_cli.reports.reference import Reference
from agentrl_cli.rollout.flags import pair_results
from agentrl_cli.store.queries import message_lines
from agentrl_cli.store.rows import EvalRow, RunRow
from agentrl_cli.types import Episode, Task, ToolCall, ToolResult

Metrics = Mapping[str, Any]

MOST, FEWEST = 10, 8
"""Steps at each end that are compared, at most; and steps of a run below which nothing is concluded from them."""
LEAST = 0.02
"""Change below which a number has not moved, however steady it is."""
SHARE, DROP, SIGMAS, UNITS = 0.5, 0.15, 2.5, 2
"""A fall: solved at most this share of its best, at least so much below it, and so many standard errors; attempts at a
task are alike, so a group counts as this many."""
ANSWERS = ("answer", "expected", "target", "solution", "label", "gold")
"""Fields of a row that hold the right answer."""


@dataclass(frozen=True, slots=True)
class Change:
    """The mean of a metric at both ends of a run."""

    before: float
    after: float
    margin: float
    """Two standard errors of the difference, at least LEAST."""

    @property
    def word(self) -> str:
        if abs(self.after - self.before) < self.margin:
            return "stayed"
        return "rose" if self.after > self.before else "fell"

    @property
    def text(self) -> str:
        if self.word == "stayed":
            return f"stayed at {self.after:.2f}"
        return f"{self.word} from {self.before:.2f} to {self.after:.2f}"


@dataclass(frozen=True, slots=True)
class Fall:
    """A training far below its best, which are steps[start:end]: the share solved there and in the newest `width`."""

    start: int
    end: int
    width: int
    best: float
    now: float


NO_RUN = RunRow("", "last", status="finished")


@dataclass(frozen=True)
class Evidence:
    """The known facts of a training, the newest step last.

    Args:
        episodes: Attempts at training tasks: of the newest step, or of the first and last ones of a stored run.
        evals: Its evaluations that could be graded, the oldest first.
        tasks: Tasks of the training and of its evaluations, by id.
        width: The newest steps over which a number is a mean.
        trained: Episodes that the newest step was trained on; None: as its metrics have it.
        compares: Whether the estimator learns from spread within groups alone.
        foreign: The finding about calls that only another parser reads.
        controls: The control tokens of the tokenizer, by id.
        moved: How far log-probabilities of the first evaluation's tokens have moved since, in nats on average.
        free: Bytes left on the disk of the store.
        changes: How the training healed; `steps` and `evals` lack those that it went back from.
        reference: The curves that its pack has of such a training.
    """

    steps: Sequence[Metrics] = ()
    episodes: Sequence[Episode] = ()
    run: RunRow = NO_RUN
    evals: Sequence[EvalRow] = ()
    tasks: Mapping[str, Task] = field(default_factory=dict)
    width: int = 1
    trained: float | None = None
    compares: bool = True
    foreign: str = ""
    controls: Mapping[int, str] = field(default_factory=dict)
    moved: float | None = None
    free: int | None = None
    changes: Sequence[Mapping[str, Any]] = ()
    reference: Reference | None = None

    @property
    def now(self) -> Metrics:
        return self.steps[-1] if self.steps else {}

    @property
    def rows(self) -> list[Task]:
        """The tasks that are trained on."""
        split = self.get("task", "split_train", "train")
        return [task for task in self.tasks.values() if task.split == split]

    @property
    def rates(self) -> list[float]:
        """Share solved in each evaluation."""
        return [row.pass_rate or 0.0 for row in self.evals]

    def get(self, section: str, key: str, default: Any) -> Any:
        """Return a setting of the run, `default` if it is not known."""
        found = self.run.config.get(section)
        return found.get(key, default) if isinstance(found, Mapping) else default

    def series(self, key: str) -> list[float]:
        """Return the finite values of a metric."""
        found = (row.get(key) for row in self.steps)
        return [float(x) for x in found if isinstance(x, (int, float)) and math.isfinite(x)]

    def mean(self, key: str) -> float | None:
        """Return the mean of a metric over the newest steps, None if they lack it."""
        newest = replace(self, steps=self.steps[-self.width :]).series(key)
        return fmean(newest) if newest else None

    def count(self, *keys: str) -> float:
        """Return the sum of some counts in the newest steps."""
        return sum(float(row.get(key) or 0) for row in self.steps[-self.width :] for key in keys)

    def change(self, key: str) -> Change | None:
        """Compare the first and the last steps in a metric; None if there are too few."""
        values = self.series(key)
        if len(values) < FEWEST:
            return None
        width = min(MOST, max(1, len(values) // 4))
        first, last = values[:width], values[-width:]
        error = math.sqrt(
            sum(variance(part) / len(part) for part in (first, last) if len(part) > 1)
        )
        return Change(fmean(first), fmean(last), max(LEAST, 2 * error))

    @cached_property
    def fall(self) -> Fall | None:
        """The fall, if the newest steps lie in one."""
        return self._find_fall(SIGMAS)

    def _find_fall(self, sigmas: float) -> Fall | None:
        solved = self.series("solved")
        units = UNITS * int(self.get("rollout", "prompts_per_step", 8))
        for width in range(1, 6):
            spans = [(max(0, end - 3), end) for end in range(1, len(solved) - width + 1)]
            if not spans:
                return None
            best, start, end = max((fmean(solved[a:b]), a, b) for a, b in spans)
            now, span = fmean(solved[-width:]), end - start
            both = (best * span + now * width) / (span + width)
            error = math.sqrt(both * (1 - both) / units * (1 / span + 1 / width))
            if now <= SHARE * best and best - now >= max(DROP, sigmas * error):
                return Fall(start, end, width, best, now)
        return None

    @cached_property
    def before(self) -> Evidence:
        """The evidence until the best steps, if the training fell since, as far as can be seen; else all of it."""
        suspected = self._find_fall(0.0)
        if suspected is None:
            return self
        steps = self.steps[: suspected.end]
        last = max((int(row.get("step", 0)) for row in steps), default=0)
        kept = [one for one in self.episodes if (one.step or 0) <= last]
        return replace(self, steps=steps, episodes=kept, trained=None)

    @cached_property
    def graded(self) -> list[Episode]:
        """The graded episodes; if the training improved, those of its last steps: it has left the first behind."""
        found = [one for one in self.episodes if one.graded]
        change = self.change("solved")
        if found and change is not None and change.word == "rose":
            last = max(one.step or 0 for one in found)
            found = [one for one in found if (one.step or 0) > last - 2]
        return found

    @cached_property
    def results(self) -> list[tuple[Episode, ToolCall, ToolResult]]:
        """Every call of the graded episodes with its answer."""
        return [
            (one, call, result)
            for one in self.graded
            for _, call, result in pair_results(one)
            if call is not None
        ]

    def expected(self, episode: Episode) -> str:
        """Return the right answer of the row as text; empty if no field holds one."""
        task = self.tasks.get(episode.task_id)
        return answer_in(task) if task is not None else ""


def describe_change(change: Mapping[str, Any]) -> str:
    """Return how a training healed, in words."""
    place = f"step {change['back']}" if change["back"] else "the base"
    values = f"{change['key']} {change['from']:g} → {change['to']:g}"
    return (
        f"Healed after step {change['step']}: {change['rule']}, so back to {place} with {values}."
    )


def answer_of(episode: Episode) -> str:
    """Return the last line of the model's last turn, after its last colon."""
    turns = [turn for turn in episode.turns if turn.role == "assistant"][-1:]
    lines = [line for turn in turns for m in turn.messages for line in message_lines([m])]
    return plain(lines[-1].rpartition(":")[2]) if lines else ""


def answer_in(task: Task) -> str:
    """Return a row's right answer as text, "" if no field holds one."""
    found = (task.data.get(name) for name in ANSWERS)
    return next((plain(str(x)) for x in found if isinstance(x, (str, int, float))), "")


def plain(text: str) -> str:
    """Return an answer without details that graders overlook: case, commas between digits, a full stop."""
    return text.strip().replace(",", "").rstrip(".").lower()
