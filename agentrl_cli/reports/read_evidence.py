"""Reads the evidence of a diagnosis from the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl_cli.config.estimators import ESTIMATORS
from agentrl_cli.reports.evidence import Evidence, Rate

if TYPE_CHECKING:
    from agentrl_cli.store import RunRow, Store

MOST = 256
"""Episodes of each end that are read, at most."""
WIDTH = 5


def read_evidence(
    store: Store, run: RunRow, steps: Sequence[Mapping[str, Any]] | None = None, ends: int = 2
) -> Evidence:
    """Return what is known of a training; its episodes are those of the first and the last `ends` sound steps."""
    rates = read_rates(store, run.id)
    alerts = store.journal.folded_alerts(run.id)
    evidence = Evidence(
        [row for row in steps or store.runs.steps(run.id) if row["step"]],
        evals=rates,
        config=run.config,
        name=run.name,
        width=WIDTH,
        compares=compares(run.config),
        foreign=next((str(row["text"]) for row in alerts if row["name"] == "parser"), ""),
        controls=control_tokens(store, run.tokenizer),
        state=(run.state, run.error),
    )
    tried = store.episodes.rows(store.episodes.ids("kind:train", "time", run.id))
    sound = {int(row["step"]) for row in evidence.before.steps}
    places = sorted({row.step or 0 for row in tried if (row.step or 0) in sound})
    near = {*places[:ends], *places[-ends:]} or {row.step or 0 for row in tried}
    picked = [row.id for row in tried if (row.step or 0) in near and row.outcome is not None]
    evaluated = store.episodes.rows(store.episodes.ids("kind:eval", "time", run.id))
    names = {row.task_id for row in (*tried, *evaluated)}
    tasks = {name: task for name in names if (task := store.tasks.get(name)) is not None}
    return replace(
        evidence,
        episodes=[store.episodes.get(name) for name in (*picked[:MOST], *picked[MOST:][-MOST:])],
        tasks=tasks,
        same=compare_attempts(store, run.id, rates),
    )


def read_rates(store: Store, run_id: str) -> list[Rate]:
    """Return the evaluations of a run that could be graded."""
    rows = store.runs.evals(run_id)
    return [Rate(e.step or 0, e.pass_rate, e.n_tasks) for e in rows if e.pass_rate is not None]


def compares(config: Mapping[str, Any]) -> bool:
    """Whether a run's estimator learns from spread within groups alone."""
    algo: Any = config.get("algo") or {}
    advantage: Any = algo.get("advantage") or {}
    found = ESTIMATORS.get(str(advantage.get("name")))
    in_reward = algo.get("kl_coef") and algo.get("kl_in") == "reward"
    return found is None or (found.compares == "rewards" and not in_reward)


def control_tokens(store: Store, tokenizer: str) -> dict[int, str]:
    """Return the control tokens of a stored tokenizer, by id."""
    stored = store.tokenizers.get(tokenizer) if tokenizer else None
    added = json.loads(stored.tokenizer_json).get("added_tokens") or [] if stored else []
    return {token["id"]: token["content"] for token in added if token.get("special")}


def compare_attempts(store: Store, run_id: str, rates: Sequence[Rate]) -> tuple[int, int]:
    """Return how many attempts of the newest evaluation are those of the first one, token by token, and of how many.

    The seed of an attempt does not depend on the weights: weights that did not move sample the same again.
    """
    if len(rates) < 2:
        return 0, 0

    def attempts(step: int) -> dict[tuple[str, int], str]:
        rows = store.episodes.rows(store.episodes.ids(f"kind:eval step:{step}", "time", run_id))
        return {(row.task_id, row.sample): row.id for row in rows if row.outcome is not None}

    first, last = attempts(rates[0].step), attempts(rates[-1].step)
    pairs = [(first[key], last[key]) for key in first.keys() & last.keys()]
    ids = store.episodes.get
    same = sum(ids(a).tokens.ids.tobytes() == ids(b).tokens.ids.tobytes() for a, b in pairs)
    return same, len(pairs)
