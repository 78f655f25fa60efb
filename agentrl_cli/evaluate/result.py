"""Results of evaluations: attempts, scores of splits and families, and two evaluations compared task by task.

An attempt with an infrastructure error is counted separately and never scored as a failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl_cli.evaluate.stats import Estimate, difference, estimate, mcnemar, pass_at_k
from agentrl_cli.store.rows import EpisodeRow, EvalRow
from agentrl_cli.types import Episode, Outcome, Task


@dataclass(frozen=True, slots=True)
class Attempt:
    """One finished episode of an evaluation, without its tokens."""

    task_id: str
    pack: str
    family: str
    split: str
    sample: int
    episode_id: str
    outcome: Outcome
    reward: float | None
    """None if not graded: a prompt that is too long counts as unsolved, but has no reward."""
    primary: float | None
    n_calls: int
    n_tool_errors: int
    n_tokens: int
    """Sampled tokens."""
    error: str = ""

    @property
    def solved(self) -> bool:
        return self.outcome is Outcome.SOLVED

    @property
    def graded(self) -> bool:
        return not self.outcome.is_error

    @classmethod
    def of(cls, episode: Episode, task: Task) -> Attempt:
        """Return the attempt of a finished episode."""
        return cls(
            task.id,
            task.pack,
            task.family,
            task.split,
            episode.sample,
            episode.id,
            Outcome(episode.outcome or Outcome.CANCELLED),
            episode.reward,
            episode.primary,
            episode.tool_calls,
            episode.tool_errors,
            episode.trained_tokens,
            episode.error,
        )

    @classmethod
    def of_row(cls, row: EpisodeRow, task: Task) -> Attempt:
        """Return the attempt of a finished episode's list row."""
        return cls(
            task.id,
            task.pack,
            task.family,
            task.split,
            row.sample,
            row.id,
            Outcome(row.outcome or Outcome.CANCELLED),
            row.reward,
            row.primary_score,
            row.n_calls,
            row.n_tool_errors,
            row.n_model_tokens,
            row.error,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """The numbers of a set of attempts. Means are over graded attempts, NaN without any."""

    n_tasks: int
    """Tasks with a graded attempt."""
    n_attempts: int
    """Graded attempts."""
    pass_at: Mapping[int, Estimate]
    """k → pass@k over the tasks with at least k graded attempts."""
    reward: float
    tool_call_rate: float
    """Share of attempts that called a tool at least once, malformed calls included."""
    tool_error_rate: float
    """Share of attempts with a failed call."""
    tokens: float
    """Sampled tokens of an attempt."""
    errors: Mapping[str, int]
    """Outcome → attempts with an infrastructure error, which are left out of all other numbers."""

    @property
    def pass_rate(self) -> float:
        return self.pass_at[1].value


def score(attempts: Iterable[Attempt], k: int) -> Score:
    """Return the numbers of some attempts, pass@1 to pass@k."""
    attempts = list(attempts)
    graded = [attempt for attempt in attempts if attempt.graded]
    tasks = by_task(graded)
    counts = [(len(group), sum(attempt.solved for attempt in group)) for group in tasks.values()]
    pass_at = {}
    for at in range(1, k + 1):
        enough = [(n, c) for n, c in counts if n >= at]
        pass_at[at] = estimate([pass_at_k(n, c, at) for n, c in enough], sum(n for n, _ in enough))
    return Score(
        n_tasks=len(tasks),
        n_attempts=len(graded),
        pass_at=pass_at,
        reward=_mean([attempt.reward for attempt in graded if attempt.reward is not None]),
        tool_call_rate=_mean([attempt.n_calls > 0 for attempt in graded]),
        tool_error_rate=_mean([attempt.n_tool_errors > 0 for attempt in graded]),
        tokens=_mean([attempt.n_tokens for attempt in graded]),
        errors=dict(Counter(attempt.outcome.value for attempt in attempts if not attempt.graded)),
    )


@dataclass(frozen=True)
class EvalResult:
    """One evaluation of one policy. `score` and `pass_rate` are of the first split; held-out families separate."""

    name: str
    k: int
    seed: int
    temperature: float
    with_tools: bool
    attempts: tuple[Attempt, ...]
    run_id: str | None = None
    step: int | None = None
    seconds: float = 0.0
    reused: int = 0
    """Attempts that were reused from the store."""
    retried: int = 0
    """Attempts made a second time after an infrastructure error."""

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The splits in the order of the tasks; `pass_rate` is of the first."""
        return tuple(dict.fromkeys(attempt.split for attempt in self.attempts))

    @cached_property
    def scores(self) -> Mapping[str, Score]:
        """Split → its numbers."""
        return {split: score(self.of(split), self.k) for split in self.splits}

    @property
    def score(self) -> Score:
        return self.scores[self.splits[0]] if self.splits else score((), self.k)

    @property
    def pass_rate(self) -> float | None:
        """pass@1 of the first split, None if nothing was graded."""
        return _number(self.score.pass_rate)

    def of(self, split: str) -> list[Attempt]:
        """Return the attempts at the tasks of a split."""
        return [attempt for attempt in self.attempts if attempt.split == split]

    def families(self, split: str) -> dict[str, Score]:
        """Family → its numbers; `pack/family` with several packs."""
        several = len({attempt.pack for attempt in self.attempts}) > 1
        groups: dict[str, list[Attempt]] = {}
        for attempt in self.of(split):
            label = f"{attempt.pack}/{attempt.family}" if several else attempt.family
            groups.setdefault(label, []).append(attempt)
        return {label: score(group, self.k) for label, group in groups.items()}

    def packs(self, split: str) -> dict[str, Score]:
        """Pack → its numbers; empty with one pack."""
        names = dict.fromkeys(attempt.pack for attempt in self.attempts)
        if len(names) < 2:
            return {}
        groups = {
            name: [attempt for attempt in self.of(split) if attempt.pack == name] for name in names
        }
        return {name: score(group, self.k) for name, group in groups.items() if group}

    @property
    def metrics(self) -> dict[str, float]:
        """Flat numbers: the first split's under plain names, others' under `<split>/`."""
        found: dict[str, float] = {}
        for split, numbers in self.scores.items():
            prefix = "" if split == self.splits[0] else f"{split}/"
            found |= {f"{prefix}pass@{at}": one.value for at, one in numbers.pass_at.items()}
            found[f"{prefix}reward"] = numbers.reward
            found[f"{prefix}tool_call_rate"] = numbers.tool_call_rate
            found[f"{prefix}tool_error_rate"] = numbers.tool_error_rate
            found[f"{prefix}completions/mean_length"] = numbers.tokens
            found[f"{prefix}errors"] = float(sum(numbers.errors.values()))
            found |= {
                f"{prefix}family/{name}": one.pass_rate
                for name, one in self.families(split).items()
            }
            found |= {
                f"{prefix}pack/{name}": one.pass_rate for name, one in self.packs(split).items()
            }
        return found

    def row(self) -> EvalRow:
        """Return the row for the store."""
        one = self.score.pass_at[1]
        facts = {"temperature": self.temperature, "seed": self.seed, "tools": self.with_tools}
        return EvalRow(
            self.run_id,
            self.step,
            self.name,
            self.splits[0] if self.splits else "",
            one.n,
            self.k,
            _number(one.value),
            _number(one.low),
            _number(one.high),
            {**self.metrics, **facts},
        )

    def report(self) -> dict[str, Any]:
        """Return all numbers as plain values, for JSON."""
        return {
            "name": self.name,
            "run_id": self.run_id,
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "reused": self.reused,
            "retried": self.retried,
            "splits": {
                split: {
                    **_plain(numbers),
                    "families": {name: _plain(one) for name, one in self.families(split).items()},
                    "packs": {name: _plain(one) for name, one in self.packs(split).items()},
                }
                for split, numbers in self.scores.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Flip:
    """A task that one policy solves and the other does not, with an episode of each to look at."""

    task_id: str
    family: str
    gained: bool
    before: tuple[int, int]
    """(solved, attempts)"""
    after: tuple[int, int]
    before_episode: str
    """A solved one of the policy that solves the task, an unsolved one of the other."""
    after_episode: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two policies on the same tasks. `difference` is of pass@1, after − before."""

    split: str
    before: str
    after: str
    n_tasks: int
    difference: Estimate
    gained: int
    lost: int
    p_value: float
    """McNemar's exact two-sided test over gained and lost tasks."""
    flips: tuple[Flip, ...]

    def report(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "split": self.split,
            "before": self.before,
            "after": self.after,
            "n_tasks": self.n_tasks,
            "difference": _values(self.difference),
            "gained": self.gained,
            "lost": self.lost,
            "p_value": self.p_value,
            "flips": [
                {name: getattr(flip, name) for name in Flip.__slots__} for flip in self.flips
            ],
        }


def compare(before: EvalResult, after: EvalResult, split: str) -> Comparison:
    """Compare two evaluations on the tasks of a split that both have graded attempts at.

    A task counts as solved if more than half of its graded attempts are: one verdict per task makes the pairs
    independent, as McNemar's test requires, and varies less than the first attempt alone. A tie is unsolved, for both.
    Flips are sorted: gained first, larger changes first.
    """
    one, two = (by_task(a for a in result.of(split) if a.graded) for result in (before, after))
    common = [task for task in one if task in two]
    rates = [[_rate(groups[task]) for task in common] for groups in (one, two)]
    sizes = [sum(len(groups[task]) for task in common) for groups in (one, two)]
    flips = [
        _flip(one[task], two[task]) for task in common if solves(one[task]) != solves(two[task])
    ]
    gained = sum(flip.gained for flip in flips)
    return Comparison(
        split=split,
        before=before.name,
        after=after.name,
        n_tasks=len(common),
        difference=difference(rates[0], rates[1], (sizes[0], sizes[1])),
        gained=gained,
        lost=len(flips) - gained,
        p_value=mcnemar(gained, len(flips) - gained),
        flips=tuple(sorted(flips, key=_by_change)),
    )


def by_task(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    """Attempts by task id, in order."""
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.task_id, []).append(attempt)
    return groups


def solves(attempts: Sequence[Attempt]) -> bool:
    """Whether more than half of the attempts at a task solved it."""
    return 2 * sum(attempt.solved for attempt in attempts) > len(attempts)


def _flip(before: Sequence[Attempt], after: Sequence[Attempt]) -> Flip:
    gained = solves(after)
    return Flip(
        task_id=before[0].task_id,
        family=before[0].family,
        gained=gained,
        before=(sum(a.solved for a in before), len(before)),
        after=(sum(a.solved for a in after), len(after)),
        before_episode=next(a.episode_id for a in before if a.solved is not gained),
        after_episode=next(a.episode_id for a in after if a.solved is gained),
    )


def _by_change(flip: Flip) -> tuple[bool, float, str]:
    change = abs(flip.after[0] / flip.after[1] - flip.before[0] / flip.before[1])
    return not flip.gained, -change, flip.task_id


def _rate(attempts: Sequence[Attempt]) -> float:
    return sum(attempt.solved for attempt in attempts) / len(attempts)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _values(one: Estimate) -> dict[str, Any]:
    return {
        "value": _number(one.value),
        "low": _number(one.low),
        "high": _number(one.high),
        "n": one.n,
    }


def _plain(numbers: Score) -> dict[str, Any]:
    return {
        "tasks": numbers.n_tasks,
        "attempts": numbers.n_attempts,
        "pass_at": {str(at): _values(one) for at, one in numbers.pass_at.items()},
        "reward": _number(numbers.reward),
        "tool_call_rate": _number(numbers.tool_call_rate),
        "tool_error_rate": _number(numbers.tool_error_rate),
        "tokens": _number(numbers.tokens),
        "errors": dict(numbers.errors),
    }
