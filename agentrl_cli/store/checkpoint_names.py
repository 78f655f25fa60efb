"""Checkpoint names as users write them, resolved to full names `RUN@WHICH`."""

from __future__ import annotations

from agentrl_cli.errors import NotFound
from agentrl_cli.store import RunRow, Store


def full_name(store: Store, name: str | None, run: str | None = None) -> str | None:
    """Resolve `best`, `last`, `base` and a step to `RUN@…` of `run` (default: the newest training).

    Other names are returned unchanged. None means the best one, or the last if none was evaluated; the result is None
    if nothing was trained yet. Raises NotFound if a run or checkpoint given by name does not exist.
    """
    if name not in (None, "best", "last", "base") and not name.isdigit():
        return name
    trainings = (r for r in store.runs.all() if r.kind == "train" and store.runs.checkpoints(r.id))
    row = store.runs.get(run) if run is not None else next(trainings, None)
    if row is None:
        if name in (None, "base"):
            return None
        raise NotFound(
            f"No checkpoint {name!r}: nothing was trained yet in {store.path}.",
            hint="`agentrl train` trains.",
        )
    kinds = {checkpoint.kind for checkpoint in store.runs.checkpoints(row.id)}
    return f"{row.name}@{name or ('best' if 'best' in kinds else 'last')}"


def trained_by(store: Store, name: str | None) -> tuple[RunRow, int] | None:
    """Return the run and the step of a checkpoint `RUN@WHICH`; None for any other name."""
    run, at, which = (name or "").rpartition("@")
    if not at or "/" in which:
        return None
    row = store.runs.get(run)
    steps = [c.step for c in store.runs.checkpoints(row.id) if which in (c.kind, str(c.step))]
    if which in ("best", "last") and not steps:  # the same fallback as `checkpoint_folder`
        found = store.runs.checkpoints(row.id)
        steps = [c.step for c in found if c.kind == "last"] or sorted(c.step for c in found)
    return row, steps[-1] if steps else 0
