"""Reads a training from its store, again and again while it goes on: each time only the new rows."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_cli.reports.diagnosis import diagnose, stages
from agentrl_cli.reports.read_evidence import read_evidence
from agentrl_cli.reports.run_data import RunData, graded_rows, group_rows
from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.types import Fact


def load(
    store: Store, run_id: str, before: RunData | None = None, now: float | None = None
) -> RunData:
    """Reads a run; given the last reading, only newer steps, logs, alerts and events.

    `now` stands for the clock, in seconds since 1970.
    """
    run = store.runs.get(run_id)
    old = before if before is not None and before.run.id == run.id else None
    # the newest step is read again: its evaluation is added to it only later
    last = int(old.steps[-1]["step"]) if old and old.steps else 0
    kept = tuple(row for row in old.steps if row["step"] < last) if old else ()
    steps = kept + tuple(store.runs.steps(run.id, last))
    rollout: Any = run.config.get("rollout") or {}
    data = RunData(
        run=run,
        steps=steps,
        evals=tuple(store.runs.evals(run.id)),
        live=tuple(store.live.all(run.id)),
        workers=tuple(store.workers.all(run.id)),
        logs=_tail(old.logs if old else (), lambda since: store.journal.logs(run.id, since), 400),
        alerts=tuple(_describe_alerts(row) for row in store.journal.folded_alerts(run.id)),
        events=_tail(
            old.events if old else (), lambda since: store.journal.events(run.id, since), 1000
        ),
        checkpoints=tuple(store.runs.checkpoints(run.id)),
        wanted=int(rollout.get("group_size", 0)) * int(rollout.get("prompts_per_step", 0)),
        pending=tuple(row.action for row in store.controls.all(run.id) if row.taken is None),
        read=time.time() if now is None else now,
    )
    done = 0
    if run.alive and data.live:
        which = f"step:{data.step} kind:eval"
        if not data.evaluating:
            newest = store.episodes.rows(store.episodes.ids("kind:train", "-time", run.id, limit=1))
            which = f"step:{newest[0].step or 0 if newest else 0} kind:train"
        done = len(store.episodes.ids(which, "time", run.id)) - len(data.live)
    here = data.step, run.status, len(data.evals)
    if old is not None and old.notable and (old.step, old.run.status, len(old.evals)) == here:
        same: dict[str, Any] = {name: getattr(old, name) for name in PER_STEP}
    else:
        same = {**notable_of(store, run.id, data.step), **_sizes(store, run.id)}
        evidence = read_evidence(store, run, steps, ends=1, free=same["free"])
        same["health"] = tuple(stages(diagnose(evidence)))
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


PER_STEP = ("notable", "advantages", "flags", "groups", "episodes", "bytes", "free", "health")
"""Read again after a step, an evaluation, and the end of the run."""


def notable_of(store: Store, run_id: str, step: int) -> dict[str, Any]:
    """Return a step's `notable` episodes (best, worst, flagged, erring), `advantages`, `flags` counted, `groups`."""
    ids = store.episodes.ids(f"step:{step} kind:train", "-reward", run_id)[:512]
    rows = store.episodes.rows(ids)
    graded = graded_rows(rows)
    best = max(graded, key=lambda row: row.reward or 0.0, default=None)
    # the worst is another one even if all are equal
    others = [row for row in graded if row is not best]
    kinds = (
        ("best", [best] if best is not None else []),
        ("worst", sorted(others, key=lambda row: row.reward or 0.0)),
        ("odd", [row for row in rows if row.flags]),
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
