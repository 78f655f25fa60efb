"""Two runs beside each other: metrics, evaluations, and task by task, flips first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl_cli.evaluate.result import Attempt, Paired, TaskPair, pair_tasks
from agentrl_cli.hooks.loggers import flat
from agentrl_cli.store import EpisodeRow, EvalRow, RunRow, Store
from agentrl_cli.types import group_pairs

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


@dataclass(frozen=True, kw_only=True)
class RunComparison(Paired):
    """Everything about two runs; `tasks`: flips first, lost before gained."""

    before: RunRow
    after: RunRow
    metrics: Sequence[tuple[str, float | None, float | None]]
    """(name, mean of the last steps before, after)"""
    settings: Sequence[tuple[str, Any, Any]]
    """(dotted key, before, after) of every setting that differs."""
    evals: Sequence[tuple[str, EvalRow | None, EvalRow | None]]
    """(split and place, before, after): the newest of each, and the best."""
    source: str
    """The attempts at the tasks: those of evaluations if both have some."""
    curves: tuple[list[tuple[float, float]], list[tuple[float, float]]]
    """(step, reward) of both."""

    def report(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        one = self.difference
        return {
            "before": self.before.name,
            "after": self.after.name,
            "metrics": {name: {"before": one, "after": two} for name, one, two in self.metrics},
            "settings": {name: {"before": one, "after": two} for name, one, two in self.settings},
            "evals": {name: {"before": _eval(one), "after": _eval(two)} for name, one, two in self.evals},
            "tasks_from": self.source,
            "difference": {"value": one.value, "low": one.low, "high": one.high} if self.tasks else None,
            "p_value": self.p_value if self.tasks else None,
            "gained": self.gained,
            "lost": self.lost,
            "tasks": [{**asdict(task), "flip": task.flip} for task in self.tasks],
        }  # fmt: skip


def compare_runs(store: Store, before: str, after: str) -> RunComparison:
    """Compare two runs, given as `store.run` takes them. Raises NotFound."""
    runs = [store.runs.get(before), store.runs.get(after)]
    steps = [store.runs.steps(run.id) for run in runs]
    a, b = (flat(run.config) for run in runs)
    settings = ((key, a.get(key), b.get(key)) for key in sorted({*a, *b}))
    source, attempts = "evaluations", [_eval_attempts(store, run) for run in runs]
    if not all(attempts):
        source = "all attempts"
        attempts = [_read_graded(store, "-kind:whatif -kind:chat", run.id) for run in runs]
    return RunComparison(
        before=runs[0],
        after=runs[1],
        metrics=_metrics(*steps),
        settings=[row for row in settings if row[1] != row[2]],
        evals=_evals(store, *(all_evals(store, run) for run in runs)),
        source=source,
        tasks=_pair_rows(*attempts),
        curves=(series(steps[0], "reward"), series(steps[1], "reward")),
    )


def flips(store: Store, run: RunRow) -> tuple[str, str, tuple[TaskPair, ...]]:
    """Return (first, last, tasks): the oldest against the newest evaluation of a run with tasks in common, flips first.

    Empty texts and no tasks if it has fewer than two.
    """
    found = group_pairs(
        ((row.split, other.name if row.step is None else f"{other.name} step {row.step}"), row)
        for other in [run, *_evaluations(store, run)]
        for row in _read_graded(store, "kind:eval", other.id)
    )
    newest = sorted(found, key=lambda key: min(row.started for row in found[key]))
    for split in dict.fromkeys(split for split, _ in reversed(newest)):
        own = [key for key in newest if key[0] == split]
        tasks = _pair_rows(found[own[0]], found[own[-1]]) if len(own) > 1 else ()
        if tasks:
            return own[0][1], own[-1][1], tasks
    return "", "", ()


def stored_name(steps: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return the stored name of a short one."""
    names = METRICS.get(name, (name,))
    return next((n for n in names if any(n in row for row in steps)), names[0])


def series(steps: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return the (step, value) pairs of a metric by its short or stored name, without NaN and missing ones."""
    key = stored_name(steps, name)
    pairs = ((row["step"], row.get(key)) for row in steps)
    return [
        (float(x), float(y)) for x, y in pairs if isinstance(y, (int, float)) and math.isfinite(y)
    ]


def _metrics(
    one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> list[tuple[str, float | None, float | None]]:
    names = {name for row in (*one[-LAST:], *two[-LAST:]) for name in row} - {"step", "at"}
    known = [stored for short in METRICS.values() for stored in short]

    def rank(name: str) -> tuple[int, str]:
        return (known.index(name) if name in known else len(known)), name

    def mean(rows: list[dict[str, Any]], name: str) -> float | None:
        found = [row[name] for row in rows[-LAST:] if isinstance(row.get(name), (int, float))]
        values = [float(value) for value in found if math.isfinite(value)]
        return sum(values) / len(values) if values else None

    return [(name, mean(one, name), mean(two, name)) for name in sorted(names, key=rank)]


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
    store: Store, one: list[EvalRow], two: list[EvalRow]
) -> list[tuple[str, EvalRow | None, EvalRow | None]]:
    """Return the newest evaluation of each run by split, and the best; two of other tasks stand apart."""
    out: list[tuple[str, EvalRow | None, EvalRow | None]] = []
    for split in sorted({row.split for row in [*one, *two]}):
        of = [[row for row in rows if row.split == split] for rows in (one, two)]
        newest = [rows[-1] if rows else None for rows in of]
        best = [max(rows, key=lambda row: row.pass_rate or 0.0, default=None) for rows in of]
        for which, (a, b) in (("newest", newest), ("best", best)):
            name = f"{split}, {which}"
            if a is None or b is None or _same_tasks(store, a, b):
                out.append((name, a, b))
            else:
                out += [(name, a, None), (f"{name}, other tasks", None, b)]
    return out


def _same_tasks(store: Store, one: EvalRow, two: EvalRow) -> bool:
    """Whether two evaluations of a split are of the same tasks: by their number alone if one has no episodes."""
    tasks = []
    for row in (one, two):
        step = "none" if row.step is None else row.step
        found = store.episodes.used(f"kind:eval step:{step}", "time", row.run_id)
        tasks.append({(each.pack, each.task_id) for each in found if each.split == row.split})
    return tasks[0] == tasks[1] if all(tasks) else one.n_tasks == two.n_tasks


def _eval(row: EvalRow | None) -> dict[str, Any] | None:
    names = ("name", "step", "split", "n_tasks", "n_samples", "pass_rate", "low", "high")
    return None if row is None else {name: getattr(row, name) for name in names}


def _eval_attempts(store: Store, run: RunRow) -> list[EpisodeRow]:
    for other in [*_evaluations(store, run)[::-1], run]:
        rows = _read_graded(store, "kind:eval", other.id)
        if rows:
            newest = max((row.step if row.step is not None else -1) for row in rows)
            return [row for row in rows if (row.step if row.step is not None else -1) == newest]
    return []


def _read_graded(store: Store, filter: str, run_id: str) -> list[EpisodeRow]:
    rows = store.episodes.used(f"{filter} -outcome:none -reward:none", "time", run_id)
    return [row for row in rows if row.outcome is not None and not row.outcome.is_error]


def _pair_rows(one: list[EpisodeRow], two: list[EpisodeRow]) -> tuple[TaskPair, ...]:
    """Return the tasks that both attempted; flips first, lost before gained."""
    order = ("lost", "gained", "")

    def rank(task: TaskPair) -> tuple[int, float, str]:
        change = task.reward_after - task.reward_before
        return order.index(task.flip), change, task.task_id

    return tuple(sorted(pair_tasks(*(map(Attempt.of_row, rows) for rows in (one, two))), key=rank))
