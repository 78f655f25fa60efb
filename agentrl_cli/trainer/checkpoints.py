"""What a run keeps: its checkpoints, the newest whole one to resume from, and per-token numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.errors import ModelError
from agentrl_cli.policies.local_checkpoint import load_state, sweep, whole
from agentrl_cli.store import Store
from agentrl_cli.store.maintenance import prunable, prune
from agentrl_cli.store.rows import CheckpointRow


def whole_checkpoints(
    store: Store, run_id: str, folder: Path, narrate: Callable[[str], None]
) -> tuple[list[CheckpointRow], dict[str, Any]]:
    """Checkpoints of a run up to the newest whole one, which is the last, and the trainer's state in that.

    One torn by a crash is skipped and said so; `folder` is where the run keeps them, and is swept first.
    """
    sweep(folder)
    found = sorted(store.checkpoints(run_id), key=lambda c: (c.step, c.id))
    while found:
        state = _state(Path(found[-1].path))
        if state is not None:
            return found, state
        narrate(f"the checkpoint {found.pop().path} is not whole: an older one is taken")
    return [], {}


def forget_old(store: Store, run_id: str, keep_last: int) -> None:
    """Remove all but the last checkpoints that were written on the way."""
    old = sorted((c for c in store.checkpoints(run_id) if c.kind == "step"), key=lambda c: c.step)
    for checkpoint in old[:-keep_last]:
        store.remove_checkpoint(run_id, checkpoint.path)
        shutil.rmtree(checkpoint.path, ignore_errors=True)


def retain(store: Store, run_id: str, config: Config) -> None:
    """Keep per-token numbers as long, and as exactly, as `store` says."""
    keep = config.store
    if keep.precision == "float16":
        prune(store, prunable(store, run=run_id), "half")
    if keep.keep_tokens_days is not None:
        prune(store, prunable(store, older_days=keep.keep_tokens_days), "numbers")


def _state(folder: Path) -> dict[str, Any] | None:
    """The trainer's state in a checkpoint, None where a crash tore it."""
    try:
        return load_state(folder) if whole(folder) else None
    except ModelError:
        return None
