"""Results of evaluations: attempts, scores of splits and families, and two evaluations compared task by task.

An attempt with an infrastructure error is counted separately and never scored as a failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl_cli.evaluate.stats import Estimate, difference, estimate, mcnemar, pass_at_k
from agentrl_cli.store.rows import EpisodeRow, EvalRow
from agentrl_cli.types import Episode, Outcome, Task, group_pairs


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
            episode.tool_calls,
            episode.tool_errors,
            episode.trained_tokens,
            episode.error,
        )

    @classmethod
    def of_row(cls, row: EpisodeRow) -> Attempt:
        """Return the attempt of a finished episode's list row."""
        return cls(
            row.task_id,
            row.pack,
            row.family,
            row.split,
            row.sample,
            row.id,
            Outcome(row.outcome or Outcome.CANCELLED),
            row.reward,
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
    tasks = _by_task(graded)
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
        return self._group(split, lambda a: f"{a.pack}/{a.family}" if several else a.family)

    def packs(self, split: str) -> dict[str, Score]:
        """Pack → its numbers; empty with one pack."""
        several = len({attempt.pack for attempt in self.attempts}) > 1
        return self._group(split, lambda a: a.pack) if several else {}

    def _group(self, split: str, label: Callable[[Attempt], str]) -> dict[str, Score]:
        groups = group_pairs((label(attempt), attempt) for attempt in self.of(split))
        return {name: score(group, self.k) for name, group in groups.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """Flat numbers: the first split's under plain names, others' under `<split>/`."""
        found: dict[str, float] = {}
        for split, numbers in self.scores.items():
            plain = {f"pass@{at}": one.value for at, one in numbers.pass_at.items()}
            plain |= {
                "reward": numbers.reward,
                "tool_call_rate": numbers.tool_call_rate,
                "tool_error_rate": numbers.tool_error_rate,
                "completions/mean_length": numbers.tokens,
                "errors": float(sum(numbers.errors.values())),
            }
            plain |= {f"family/{name}": x.pass_rate for name, x in self.families(split).items()}
            plain |= {f"pack/{name}": x.pass_rate for name, x in self.packs(split).items()}
            prefix = "" if split == self.splits[0] else f"{split}/"
            found |= {f"{prefix}{name}": value for name, value in plain.items()}
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
class TaskPair:
    """A task in two sets of attempts: (solved, attempts), the mean reward and an episode to look at, of each."""

    task_id: str
    family: str
    before: tuple[int, int]
    after: tuple[int, int]
    reward_before: float
    reward_after: float
    episode_before: str
    """It shows the verdict: a solved one if most of the attempts are, else an unsolved one."""
    episode_after: str

    @property
    def flip(self) -> str:
        """`gained`, `lost` or nothing: a task is solved if more than half of its attempts are.

        One verdict per task makes the pairs independent, as McNemar's test requires, and varies less than the first
        attempt alone. A tie is unsolved, for both.
        """
        was, now = (2 * solved > attempts for solved, attempts in (self.before, self.after))
        return "" if was == now else "gained" if now else "lost"


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two sets of attempts on the tasks that both have."""

    tasks: tuple[TaskPair, ...]

    @cached_property
    def difference(self) -> Estimate:
        """The difference of the share solved (pass@1), after − before."""
        shares, sizes = [], []
        for counts in ([t.before for t in self.tasks], [t.after for t in self.tasks]):
            shares.append([solved / attempts for solved, attempts in counts])
            sizes.append(sum(attempts for _, attempts in counts))
        return difference(shares[0], shares[1], (sizes[0], sizes[1]))

    @property
    def gained(self) -> int:
        return sum(task.flip == "gained" for task in self.tasks)

    @property
    def lost(self) -> int:
        return sum(task.flip == "lost" for task in self.tasks)

    @property
    def p_value(self) -> float:
        """McNemar's exact two-sided test over gained and lost tasks."""
        return mcnemar(self.gained, self.lost)


@dataclass(frozen=True, kw_only=True)
class Comparison(Paired):
    """Two policies on the tasks of a split that both have graded attempts at."""

    split: str
    before: str
    after: str

    @cached_property
    def flips(self) -> list[TaskPair]:
        """The tasks that one solves and the other does not, gained first, larger changes first."""

        def change(task: TaskPair) -> float:
            return abs(task.after[0] / task.after[1] - task.before[0] / task.before[1])

        flipped = [task for task in self.tasks if task.flip]
        return sorted(flipped, key=lambda task: (task.flip, -change(task), task.task_id))

    def report(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "split": self.split,
            "before": self.before,
            "after": self.after,
            "n_tasks": len(self.tasks),
            "difference": _values(self.difference),
            "gained": self.gained,
            "lost": self.lost,
            "p_value": self.p_value,
            "flips": [
                {"task_id": task.task_id, "family": task.family, "gained": task.flip == "gained",
                 "before": task.before, "after": task.after,
                 "before_episode": task.episode_before, "after_episode": task.episode_after}
                for task in self.flips
            ],
        }  # fmt: skip


def compare(before: EvalResult, after: EvalResult, split: str) -> Comparison:
    """Compare two evaluations on a split."""
    tasks = pair_tasks(before.of(split), after.of(split))
    return Comparison(tasks=tasks, split=split, before=before.name, after=after.name)


def pair_tasks(before: Iterable[Attempt], after: Iterable[Attempt]) -> tuple[TaskPair, ...]:
    """Pair two sets of attempts by task; tasks that one of them has no graded attempts at are left out."""
    one, two = (_by_task(a for a in attempts if a.graded) for attempts in (before, after))
    pairs = []
    for key in (key for key in one if key in two):
        (was, reward_before, shown_before), (now, reward_after, shown_after) = (
            _summarise(groups[key]) for groups in (one, two)
        )
        rewards, shown = (reward_before, reward_after), (shown_before, shown_after)
        pairs.append(TaskPair(key[1], one[key][0].family, was, now, *rewards, *shown))
    return tuple(pairs)


def _summarise(attempts: Sequence[Attempt]) -> tuple[tuple[int, int], float, str]:
    """Return (solved, attempts), the mean reward, and an episode that shows the verdict."""
    solved = sum(attempt.solved for attempt in attempts)
    most = 2 * solved > len(attempts)
    shown = next(attempt.episode_id for attempt in attempts if attempt.solved is most)
    return (solved, len(attempts)), _mean([a.reward or 0.0 for a in attempts]), shown


def _by_task(attempts: Iterable[Attempt]) -> dict[tuple[str, str], list[Attempt]]:
    return group_pairs(((attempt.pack, attempt.task_id), attempt) for attempt in attempts)


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
