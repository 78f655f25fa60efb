"""Two runs beside each other: metrics, evaluations, and task by task, flips first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_cli.store import EpisodeRow, EvalRow, RunRow, Store

METRICS: dict[str, tuple[str, ...]] = {
    "reward": ("reward", "reward/mean", "train/reward"),
    "solved": ("solved", "primary", "train/solved", "pass_rate"),
    "loss": ("loss", "policy_loss", "loss/policy"),
    "entropy": ("entropy", "policy/entropy"),
    "kl": ("kl", "kl/ref"),
    "mismatch": (
        "sampling/sampling_logp_difference/mean",
        "sampling/logp_difference",
        "mismatch_kl",
        "logp_gap",
        "mismatch",
    ),
    "clip": ("clip_ratio/region_mean", "clip_ratio/high_mean", "clip_ratio", "clipfrac"),
    "grad_norm": ("grad_norm", "optim/grad_norm"),
    "lr": ("learning_rate", "lr"),
    "zero_std": ("frac_reward_zero_std", "groups/zero_variance"),
    "all_solved": ("groups/all_solved",),
    "all_failed": ("groups/all_failed",),
    "tool_errors": (
        "tools/error_rate",
        "tools/failure_frequency",
        "tool_error_rate",
        "tool_errors",
    ),
    "tool_calls": ("tools/call_frequency", "tools/call_rate", "tool_call_rate", "tool_calls"),
    "length": ("completions/mean_length", "tokens/mean", "length"),
    "cut": ("completions/clipped_ratio", "truncated"),
    "turns": ("turns", "turns/mean", "n_turns"),
    "seconds": ("time/step", "step_time", "seconds"),
}
"""Short name to the names it may have in the store; the first that is found wins."""
LAST = 10
"""Steps over which a metric is averaged."""


@dataclass(frozen=True, slots=True)
class TaskLine:
    """One task in both runs: (solved, attempts), mean reward, an episode of each to look at."""

    task_id: str
    family: str
    before: tuple[int, int]
    after: tuple[int, int]
    reward_before: float
    reward_after: float
    episode_before: str
    episode_after: str

    @property
    def flip(self) -> str:
        """`gained`, `lost` or nothing: solved is more than half of the attempts."""
        was, now = 2 * self.before[0] > self.before[1], 2 * self.after[0] > self.after[1]
        return "" if was == now else "gained" if now else "lost"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Everything about two runs. `tasks` come from `source`: evaluations where both have some."""

    before: RunRow
    after: RunRow
    metrics: tuple[tuple[str, float | None, float | None], ...]
    """(name, mean of the last steps before, after)"""
    settings: tuple[tuple[str, Any, Any], ...]
    """(dotted key, before, after) of every setting that differs."""
    evals: tuple[tuple[str, EvalRow | None, EvalRow | None], ...]
    """(split and place, before, after): the newest of each."""
    source: str
    tasks: tuple[TaskLine, ...]
    difference: tuple[float, float, float] | None
    """Difference of the share solved, after − before, with its 95 % interval."""
    p_value: float | None
    """McNemar's exact test over gained and lost tasks."""
    curves: tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]
    """(step, reward) of both."""

    @property
    def gained(self) -> int:
        return sum(line.flip == "gained" for line in self.tasks)

    @property
    def lost(self) -> int:
        return sum(line.flip == "lost" for line in self.tasks)

    def report(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "before": self.before.name,
            "after": self.after.name,
            "metrics": {name: {"before": one, "after": two} for name, one, two in self.metrics},
            "settings": {name: {"before": one, "after": two} for name, one, two in self.settings},
            "evals": {name: {"before": _eval(one), "after": _eval(two)} for name, one, two in self.evals},
            "tasks_from": self.source,
            "difference": None if self.difference is None else dict(
                zip(("value", "low", "high"), self.difference, strict=True)
            ),
            "p_value": self.p_value,
            "gained": self.gained,
            "lost": self.lost,
            "tasks": [
                {**{name: getattr(line, name) for name in TaskLine.__slots__}, "flip": line.flip}
                for line in self.tasks
            ],
        }  # fmt: skip


def compare_runs(store: Store, before: str, after: str) -> RunComparison:
    """Compare two runs, given as `store.run` takes them. Raises NotFound."""
    one, two = store.runs.get(before), store.runs.get(after)
    steps = [store.runs.steps(run.id) for run in (one, two)]
    source, (rows_one, rows_two) = _attempts(store, one, two)
    tasks = _tasks(rows_one, rows_two)
    difference, p_value = _statistics(tasks)
    return RunComparison(
        one,
        two,
        _metrics(steps[0], steps[1]),
        _settings(one.config, two.config),
        _evals(all_evals(store, one), all_evals(store, two)),
        source,
        tasks,
        difference,
        p_value,
        (_curve(steps[0]), _curve(steps[1])),
    )


def flips(store: Store, run: RunRow) -> tuple[str, str, tuple[TaskLine, ...]]:
    """Return (first, last, tasks): the oldest against the newest evaluation of a run with tasks in common, flips first.

    Empty texts and no tasks if it has fewer than two.
    """
    found: dict[tuple[str, str], list[EpisodeRow]] = {}
    for other in [run, *_evaluations(store, run)]:
        for row in _read_graded(store, "kind:eval", other.id):
            label = other.name if row.step is None else f"{other.name} step {row.step}"
            found.setdefault((row.split, label), []).append(row)
    newest = sorted(found, key=lambda key: min(row.started for row in found[key]))
    for split in dict.fromkeys(split for split, _ in reversed(newest)):
        own = [key for key in newest if key[0] == split]
        tasks = _tasks(found[own[0]], found[own[-1]]) if len(own) > 1 else ()
        if tasks:
            return own[0][1], own[-1][1], tasks
    return "", "", ()


def _curve(steps: list[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
    return tuple(
        (float(row["step"]), float(row["reward"])) for row in steps if _finite(row.get("reward"))
    )


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _metrics(
    one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> tuple[tuple[str, float | None, float | None], ...]:
    names = sorted(
        {name for rows in (one, two) for row in rows[-LAST:] for name in row} - {"step", "at"}
    )
    known = [stored for short in METRICS.values() for stored in short]
    names.sort(key=lambda name: known.index(name) if name in known else len(known))

    def mean(rows: list[dict[str, Any]], name: str) -> float | None:
        values = [float(row[name]) for row in rows[-LAST:] if _finite(row.get(name))]
        return sum(values) / len(values) if values else None

    return tuple((name, mean(one, name), mean(two, name)) for name in names)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted keys."""
    out: dict[str, Any] = {}
    for name, value in config.items():
        nested = isinstance(value, Mapping) and value
        out |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return out


def _settings(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """Return the settings that differ; None where a run has not that key."""
    a, b = flatten(one), flatten(two)
    pairs = ((key, a.get(key), b.get(key)) for key in sorted({*a, *b}))
    return tuple(pair for pair in pairs if pair[1] != pair[2])


def _evaluations(store: Store, run: RunRow) -> list[RunRow]:
    """Return the evaluation runs of a training, oldest first."""
    return [row for row in store.runs.all()[::-1] if row.kind == "eval" and row.parent_id == run.id]


def all_evals(store: Store, run: RunRow) -> list[EvalRow]:
    """Return the evaluations of a run, by itself and by `agentrl eval`, oldest first."""
    rows = [
        *store.runs.evals(run.id),
        *(row for other in _evaluations(store, run) for row in store.runs.evals(other.id)),
    ]
    return sorted(rows, key=lambda row: row.at)


def _evals(
    one: list[EvalRow], two: list[EvalRow]
) -> tuple[tuple[str, EvalRow | None, EvalRow | None], ...]:
    """Return the newest evaluation of each run by split, and the best."""
    out: list[tuple[str, EvalRow | None, EvalRow | None]] = []
    for split in sorted({row.split for row in [*one, *two]}):
        of = [[row for row in rows if row.split == split] for rows in (one, two)]
        best = [max(rows, key=lambda row: row.pass_rate or 0.0, default=None) for rows in of]
        out.append((f"{split}, newest", of[0][-1] if of[0] else None, of[1][-1] if of[1] else None))
        out.append((f"{split}, best", best[0], best[1]))
    return tuple(out)


def _eval(row: EvalRow | None) -> dict[str, Any] | None:
    names = ("name", "step", "split", "n_tasks", "n_samples", "pass_rate", "low", "high")
    return None if row is None else {name: getattr(row, name) for name in names}


def _attempts(
    store: Store, one: RunRow, two: RunRow
) -> tuple[str, tuple[list[EpisodeRow], list[EpisodeRow]]]:
    """Return the graded attempts to compare task by task: of evaluations where both have some, else of the runs."""
    evals = [_eval_attempts(store, run) for run in (one, two)]
    if evals[0] and evals[1]:
        return "evaluations", (evals[0], evals[1])
    own = [_read_graded(store, "-kind:whatif -kind:chat", run.id) for run in (one, two)]
    return "all attempts", (own[0], own[1])


def _eval_attempts(store: Store, run: RunRow) -> list[EpisodeRow]:
    for other in [*_evaluations(store, run)[::-1], run]:
        rows = _read_graded(store, "kind:eval", other.id)
        if rows:
            newest = max((row.step if row.step is not None else -1) for row in rows)
            return [row for row in rows if (row.step if row.step is not None else -1) == newest]
    return []


def _read_graded(store: Store, filter: str, run_id: str) -> list[EpisodeRow]:
    rows = store.episodes.rows(
        store.episodes.ids(f"{filter} -outcome:none -reward:none", "time", run_id)
    )
    return [row for row in rows if row.outcome is not None and not row.outcome.is_error]


def _tasks(one: list[EpisodeRow], two: list[EpisodeRow]) -> tuple[TaskLine, ...]:
    """Return the tasks that both attempted; flips first, lost before gained."""
    groups: tuple[dict[tuple[str, str], list[EpisodeRow]], ...] = ({}, {})
    for group, rows in zip(groups, (one, two), strict=True):
        for row in rows:
            group.setdefault((row.pack, row.task_id), []).append(row)
    lines = []
    for key in groups[0].keys() & groups[1].keys():
        (won, reward, example), (won_after, reward_after, example_after) = (
            _summarise(group[key]) for group in groups
        )
        line = TaskLine(
            key[1],
            groups[0][key][0].family,
            won,
            won_after,
            reward,
            reward_after,
            example,
            example_after,
        )
        lines.append(line)
    order = ("lost", "gained", "")
    return tuple(
        sorted(
            lines,
            key=lambda line: (
                order.index(line.flip),
                line.reward_after - line.reward_before,
                line.task_id,
            ),
        )
    )


def _summarise(rows: list[EpisodeRow]) -> tuple[tuple[int, int], float, str]:
    """Return (solved, attempts), the mean reward, and an episode that shows the verdict: a solved one if most are."""
    solved = sum(row.outcome == "solved" for row in rows)
    most = 2 * solved > len(rows)
    example = next(row.id for row in rows if (row.outcome == "solved") is most)
    return (solved, len(rows)), sum(row.reward or 0.0 for row in rows) / len(rows), example


def _statistics(
    tasks: tuple[TaskLine, ...],
) -> tuple[tuple[float, float, float] | None, float | None]:
    from agentrl_cli.evaluate.stats import difference, mcnemar

    if not tasks:
        return None, None
    rates = [
        [line.before[0] / line.before[1] for line in tasks],
        [line.after[0] / line.after[1] for line in tasks],
    ]
    sizes = (sum(line.before[1] for line in tasks), sum(line.after[1] for line in tasks))
    found = difference(rates[0], rates[1], sizes)
    gained, lost = (sum(line.flip == name for line in tasks) for name in ("gained", "lost"))
    return (found.value, found.low, found.high), mcnemar(gained, lost)
