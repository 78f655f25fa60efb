"""Checkpoint names as users write them, resolved to full names `RUN@WHICH`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl_cli.errors import NotFound
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.rows import CheckpointRow


def split_checkpoint(name: str | None) -> tuple[str, str] | None:
    """Return the run and which of its checkpoints `RUN@WHICH` names; None for any other name, such as `./folder@v1`.

    A run's name may hold a slash; one that begins as a path does is a path.
    """
    run, at, which = (name or "").rpartition("@")
    is_path = "/" in which or run.startswith(("/", "./", "../", "~"))
    return (run, which) if at and not is_path else None


def full_name(store: Store, name: str | None, run: str | None = None) -> str | None:
    """Resolve `best`, `last`, `base` and a step to `RUN@…` of `run` (default: the newest training).

    So is `last@WHICH`; other names are returned unchanged. None means the best one, or the last if nothing but the
    base was evaluated; the result is None if nothing was trained yet. Raises NotFound if a run or checkpoint given by
    name does not exist.
    """
    parts = split_checkpoint(name)
    if parts is not None and parts[0] == "last":
        return f"{run_of(store, 'last').name}@{parts[1]}"
    if name not in (None, "best", "last", "base") and not name.isdigit():
        return name
    row = store.runs.get(run) if run is not None else _newest_training(store)
    if row is None:
        if name in (None, "base"):
            return None
        raise NotFound(
            f"No checkpoint {name!r}: nothing was trained yet in {store.path}.",
            hint="`agentrl train` trains.",
        )
    if name is None:
        best = [c.step for c in store.runs.checkpoints(row.id) if c.kind == "best"]
        name = "best" if any(best) or (best and _has_been_evaluated(store, row)) else "last"
    return f"{row.name}@{name}"


def run_of(store: Store, name: str) -> RunRow:
    """Return the run of a checkpoint; `last` is the newest training with checkpoints. Raises NotFound."""
    return (_newest_training(store) if name == "last" else None) or store.runs.get(name)


def _newest_training(store: Store) -> RunRow | None:
    trainings = (row for row in store.runs.all() if row.kind == "train")
    return next((row for row in trainings if store.runs.checkpoints(row.id)), None)


def _has_been_evaluated(store: Store, run: RunRow) -> bool:
    """Whether weights of a training were evaluated, beside those of its base."""
    return any(row.step for row in store.runs.evals(run.id) if row.pass_rate is not None)


def explain_best(store: Store, name: str | None) -> str:
    """Return a warning if RUN@best are the weights that a training began with, and later ones are kept; else empty."""
    if name is None or not name.endswith("@best"):
        return ""
    best, last = trained_by(store, name), trained_by(store, name.removesuffix("best") + "last")
    if best is None or last is None or best[1] or not last[1]:
        return ""
    run, step = last
    better = "no later evaluation is better"
    why = better if _has_been_evaluated(store, run) else "nothing was evaluated since"
    began = "step 0, the weights that the training began with"
    return f"{name} is {began}: {why}. {run.name}@last has step {step}."


def trained_by(store: Store, name: str | None) -> tuple[RunRow, int] | None:
    """Return the run and the step of a checkpoint `RUN@WHICH`; None for any other name."""
    parts = split_checkpoint(name)
    if parts is None:
        return None
    run, which = parts
    row = run_of(store, run)
    found = select_checkpoint(store.runs.checkpoints(row.id), which)
    return row, found.step if found else 0


def select_checkpoint(found: Sequence[CheckpointRow], which: str) -> CheckpointRow | None:
    """Return which of a run's checkpoints `best`, `last` or a step names, the newest if several; None if absent.

    While a run goes on, or if it was killed, `best` and `last` may be missing: then the last one, or the latest step.
    """
    step = int(which) if which.isdecimal() else None
    named = [c for c in found if c.kind == which or c.step == step]
    if not named and which in ("best", "last"):
        named = [c for c in found if c.kind == "last"] or sorted(found, key=lambda c: c.step)
    return named[-1] if named else None


def pin_version(store: Store | None, name: str, folder: Path) -> str:
    """Return `RUN@STEP` of a checkpoint loaded from a folder, whatever `best` means later; other names unchanged."""
    parts = split_checkpoint(name)
    if parts is None or store is None or parts[1] == "base":
        return name
    run = run_of(store, parts[0])
    steps = [c.step for c in store.runs.checkpoints(run.id) if Path(c.path) == folder]
    return f"{run.name}@{steps[-1]}" if steps else name
