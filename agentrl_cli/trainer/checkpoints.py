"""A run's files: its checkpoints, the newest usable one to resume from, and per-token numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.config import StoreConfig, TrainConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.models.checkpoint import (
    DamagedCheckpoint,
    load_state,
    load_weights,
    save_checkpoint,
    sweep,
)
from agentrl_cli.store import CheckpointRow, RunRow, Store
from agentrl_cli.store.maintenance import prunable, prune

if TYPE_CHECKING:
    from agentrl_cli.learning.protocols import PolicyLearner
    from agentrl_cli.policies.load import Loaded


NEAR = 5
"""Steps between two checkpoints of a run that heals, at most."""


class Checkpoints:
    """The checkpoints of one run: `best`, `last`, and one every `train.save.every` steps."""

    def __init__(
        self,
        config: TrainConfig,
        store: Store,
        run: RunRow,
        loaded: Loaded,
        learner: PolicyLearner,
        narrate: Callable[[str], None],
    ) -> None:
        self.config = config
        self.store = store
        self.run_id = run.id
        self.folder = Path(run.dir) / "checkpoints"
        self.loaded = loaded
        self.learner = learner
        self.narrate = narrate

    def due(self, step: int) -> bool:
        """Whether a checkpoint is kept after this step, counted from 1."""
        every = min(self.config.save.every, NEAR if self.config.heal else self.config.save.every)
        return step % every == 0 and 0 < step < self.config.steps

    def has_best(self, step: int) -> bool:
        """Whether the best evaluation so far is that of this step."""
        return any(c.kind == "best" and c.step == step for c in self._list())

    def lead_back(self) -> bool:
        """Whether there is one that a healing could load: `last` is that of an end."""
        return any(c.kind != "last" for c in self._list())

    def missing(self, step: int) -> bool:
        """Whether one is due after this step and the store has none of it."""
        return self.due(step) and step not in {c.step for c in self._list() if c.kind == "step"}

    def save(
        self, kind: str, step: int, best: float | None, also: Callable[[], None] = lambda: None
    ) -> Path:
        """Write a checkpoint (best, last or step) and its row, with `also` in one transaction. Returns its folder."""
        folder = self.folder / (kind if kind in ("best", "last") else f"step-{step:06d}")
        assert self.loaded.folder is not None
        with waiting(f"the disk, for the checkpoint {folder}"):
            state = {"step": step, "best": best, **self.learner.state()}
            save_checkpoint(folder, self.loaded.model, self.loaded.folder, state)
        self._add(kind, folder, step, best, also)
        return folder

    def forget_old(self, step: int, besides: str = "") -> None:
        """Delete all but the last `train.save.keep` checkpoints up to this step; the folder `besides` stays too.

        Of later steps there are some if a resume could not use them and began earlier.
        """
        old = sorted(
            (c for c in self._list() if c.kind == "step" and c.step <= step), key=lambda c: c.step
        )
        for path in [c.path for c in old[: -self.config.save.keep] if c.path != besides]:
            self.store.runs.remove_checkpoint(self.run_id, path)
            shutil.rmtree(path, ignore_errors=True)

    def load(self, folder: Path) -> None:
        """Load a checkpoint into model and learner. Raises DamagedCheckpoint."""
        state = load_state(folder)
        load_weights(self.loaded.model, folder)
        self._load_learner(state, folder)

    def restore(self) -> Mapping[str, Any]:
        """Load the newest usable checkpoint into model and learner. Returns the trainer's state; empty if none is.

        A damaged one is skipped, with a sentence; without any the run starts again from its first step. The folder is
        swept first. Raises ModelError if none can be used and one of them was partly loaded.
        """
        sweep(self.folder)
        found = sorted(self._list(), key=lambda c: (c.step, c.id))
        changed = False
        while found:
            path = Path(found[-1].path)
            try:
                state = load_state(path)
                load_weights(self.loaded.model, path)
                changed = True
                self._load_learner(state, path)
            except DamagedCheckpoint as error:
                found.pop()
                none = "none is left, so the run starts again at its first step"
                then = "an older one is taken" if found else none
                self.narrate(f"the checkpoint {path} is not whole ({error.why}): {then}")
            else:
                if state["step"] != found[-1].step:  # killed between a `best` or `last` and its row
                    self._add(found[-1].kind, path, int(state["step"]), state.get("best"))
                return state
        if changed:  # the weights differ from those of the first step
            raise ModelError(
                f"No checkpoint under {self.folder} can be resumed from.",
                hint="Delete that folder: the run then starts again from step 1, with the episodes in the store.",
            )
        return {}

    def _list(self) -> list[CheckpointRow]:
        return self.store.runs.checkpoints(self.run_id)

    def _add(
        self,
        kind: str,
        folder: Path,
        step: int,
        best: float | None,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        with self.store.transaction():
            self.store.runs.add_checkpoint(self.run_id, step, folder, {"best": best}, kind)
            self.store.journal.add_event(self.run_id, "checkpoint", {"kind": kind, "step": step})
            also()

    def _load_learner(self, state: Mapping[str, Any], folder: Path) -> None:
        """Load optimizer, value head and coefficients. Raises DamagedCheckpoint if the state is another learner's."""
        try:
            self.learner.load_state(state)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            why = f"its optimizer state does not fit: {type(error).__name__}: {error}"
            raise DamagedCheckpoint(folder, why.splitlines()[0]) from error


def retain(store: Store, run_id: str, keep: StoreConfig) -> None:
    """Keep per-token numbers as long, and as precisely, as the section `store` of the configuration sets.

    Steps after the newest checkpoint stay precise: a resume trains on their episodes.
    """
    if keep.precision == "float16":
        saved = max((c.step for c in store.runs.checkpoints(run_id)), default=0)
        prune(store, prunable(store, run=run_id, filter=f"step:<={saved}"), "half")
    if keep.keep_tokens_days is not None:
        prune(store, prunable(store, older_days=keep.keep_tokens_days), "numbers")
