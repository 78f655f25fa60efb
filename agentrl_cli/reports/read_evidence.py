"""Reads the evidence of a diagnosis from the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from agentrl_cli.config.estimators import ESTIMATORS
from agentrl_cli.reports import reference
from agentrl_cli.reports.evidence import Evidence
from agentrl_cli.store import RunRow, Store

MOST = 256
"""Episodes of each end that are read, at most."""
WIDTH = 5
"""Steps over which its numbers are means."""
ROWS = 2000
"""Tasks that are read, at most."""


def read_evidence(
    store: Store,
    run: RunRow,
    steps: Sequence[Mapping[str, Any]] | None = None,
    *,
    ends: int = 2,
    **known: Any,
) -> Evidence:
    """Return the evidence of a training; its episodes are those of the first and the last `ends` sound steps.

    `steps`: its metrics, if they were read already, or made of rollouts. `known`: fields that need not be read; with
    `episodes` no episode is.
    """
    changes = store.journal.healed(run.id)
    left = {n for change in changes for n in range(change["back"] + 1, change["step"] + 1)}
    evals = [row for row in store.runs.evals(run.id) if row.step not in left]
    evals = [row for row in evals if row.pass_rate is not None]
    alerts = store.journal.folded_alerts(run.id)
    kept = store.journal.newest_event(run.id, reference.EVENT)
    evidence = Evidence(
        [row for row in steps or store.runs.steps(run.id) if row["step"] not in {0, *left}],
        run=run,
        evals=evals,
        width=WIDTH,
        compares=compares(run.config),
        foreign=next((str(row["text"]) for row in alerts if row["name"] == "parser"), ""),
        controls=control_tokens(store, run.tokenizer),
        moved=measure_movement(store, run.id, *(evals[n].step or 0 for n in (0, -1)))
        if evals
        else None,
        changes=changes,
        reference=reference.parse_reference(kept) if kept else None,
    )
    if "episodes" in known:
        return replace(evidence, **known)
    sound = [int(row["step"]) for row in evidence.before.steps]
    near = sorted({*sound[:ends], *sound[-ends:]}) if run.kind == "train" else [0]
    picked = [
        row.id
        for step in near
        for row in store.episodes.used(f"kind:{run.kind} step:{step}", "time", run.id)
        if row.outcome is not None
    ]
    names = store.select("SELECT DISTINCT task_id FROM episodes WHERE run_id=?", (run.id,))
    tasks = {name: task for (name,) in names[:ROWS] if (task := store.tasks.get(name)) is not None}
    episodes = [store.episodes.get(name) for name in (*picked[:MOST], *picked[MOST:][-MOST:])]
    return replace(evidence, episodes=episodes, tasks=tasks, **known)


def compares(config: Mapping[str, Any]) -> bool:
    """Whether a run's estimator learns from spread within groups alone."""
    found = ESTIMATORS.get(str(reference.get_setting(config, "algo.advantage.name")))
    coefficient, where = (reference.get_setting(config, f"algo.kl.{k}") for k in ("coef", "where"))
    in_reward = coefficient and where == "reward"
    return found is None or (found.compares == "rewards" and not in_reward)


@lru_cache(maxsize=8)
def control_tokens(store: Store, tokenizer: str) -> dict[int, str]:
    """Return the control tokens of a stored tokenizer, by id."""
    stored = store.tokenizers.get(tokenizer) if tokenizer else None
    added = json.loads(stored.tokenizer_json).get("added_tokens") or [] if stored else []
    return {token["id"]: token["content"] for token in added if token.get("special")}


@lru_cache(maxsize=8)
def measure_movement(store: Store, run_id: str, start: int, end: int) -> float | None:
    """Return the change of an evaluation's log-probabilities until another one, in nats; None if unknown.

    An attempt has the same seed in every evaluation: its tokens are compared until they part, in the same context.
    """

    def attempts(step: int) -> dict[tuple[str, int], str]:
        rows = store.episodes.used(f"kind:eval step:{step}", "time", run_id)
        return {(row.task_id, row.sample): row.id for row in rows if row.outcome is not None}

    first, last = attempts(start), attempts(end)
    moved: list[float] = []
    for key in first.keys() & last.keys():
        one, other = (store.episodes.get(found[key]).tokens for found in (first, last))
        n = min(len(one), len(other))
        parted = np.flatnonzero(one.ids[:n] != other.ids[:n])
        same = slice(0, parted[0] if len(parted) else n)
        both = one.trained_mask[same] & other.trained_mask[same]
        gaps = np.abs(one.logp_policy[same] - other.logp_policy[same])[both]
        moved += gaps[~np.isnan(gaps)].tolist()  # those that were pruned are not known
    return float(np.mean(moved)) if moved and start < end else None
