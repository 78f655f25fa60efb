"""What a run keeps: its checkpoints, the newest usable one to resume from, and per-token numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.config import Config
from agentrl_cli.errors import ModelError
from agentrl_cli.models.checkpoint import DamagedCheckpoint, load_state, load_weights, sweep, whole
from agentrl_cli.store import Store
from agentrl_cli.store.maintenance import prunable, prune
from agentrl_cli.store.rows import CheckpointRow

if TYPE_CHECKING:
    from torch import nn

    from agentrl_cli.learning.update import Learner


def restore(
    store: Store, run_id: str, folder: Path, narrate: Callable[[str], None], model: nn.Module, learner: Learner
) -> tuple[list[CheckpointRow], Mapping[str, Any]]:
    """Load the newest checkpoint of a run that can be used into its model and learner.

    Returns the run's checkpoints up to that one, which is the last, and the trainer's state in it. A damaged one is
    skipped, with a sentence; without any the run starts again from its first step. `folder` is where the run keeps
    them, and is swept first. Raises ModelError if none can be used and one of them was loaded halfway.
    """
    sweep(folder)
    found = sorted(store.runs.checkpoints(run_id), key=lambda c: (c.step, c.id))
    changed = False
    while found:
        path = Path(found[-1].path)
        try:
            state = load_state(path)
            if not whole(path):
                raise DamagedCheckpoint(path, "a file is missing")
            load_weights(model, path)
            changed = True
            _load_learner(learner, state, path)
        except DamagedCheckpoint as error:
            found.pop()
            then = "an older one is taken" if found else "none is left, so the run starts again at its first step"
            narrate(f"the checkpoint {path} is not whole ({error.why}): {then}")
        else:
            return found, state
    if changed:  # the weights are no longer those of the first step
        raise ModelError(
            f"No checkpoint under {folder} can be resumed from.",
            hint="Delete that folder: the run then starts again from its first step, with the episodes in the store.",
        )
    return [], {}


def _load_learner(learner: Learner, state: Mapping[str, Any], folder: Path) -> None:
    """Load optimizer, value head and coefficients. Raises DamagedCheckpoint if the state is not this learner's."""
    try:
        learner.load_state(state)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        why = f"its optimizer state does not fit: {type(error).__name__}: {error}"
        raise DamagedCheckpoint(folder, why.splitlines()[0]) from error


def forget_old(store: Store, run_id: str, keep_last: int) -> None:
    """Remove all but the last checkpoints that were written on the way."""
    old = sorted((c for c in store.runs.checkpoints(run_id) if c.kind == "step"), key=lambda c: c.step)
    for checkpoint in old[:-keep_last]:
        store.runs.remove_checkpoint(run_id, checkpoint.path)
        shutil.rmtree(checkpoint.path, ignore_errors=True)


def retain(store: Store, run_id: str, config: Config) -> None:
    """Keep per-token numbers as long, and as exactly, as `store` says."""
    keep = config.store
    if keep.precision == "float16":
        prune(store, prunable(store, run=run_id), "half")
    if keep.keep_tokens_days is not None:
        prune(store, prunable(store, older_days=keep.keep_tokens_days), "numbers")
