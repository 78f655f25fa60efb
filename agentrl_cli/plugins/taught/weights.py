"""The weights of a training at every step that the store has: probabilities under them, and slopes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl_cli.config import load_config
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.learning.forward import logprobs
from agentrl_cli.learning.optimizers import trainable
from agentrl_cli.learning.packing import Rows, Segment, pack, select_segments
from agentrl_cli.learning.step_table import StepTable
from agentrl_cli.models.adapter import switch_length
from agentrl_cli.models.checkpoint import load_state
from agentrl_cli.models.checkpoint import load_weights as put_weights
from agentrl_cli.models.load import model_folder
from agentrl_cli.policies.load import load_weights
from agentrl_cli.store import RunRow, Store

STEP = 0.02
"""By how much the token's log-probability is moved to measure a slope, in nats."""


@dataclass(frozen=True, slots=True)
class Direction:
    """The change of the weights that raises a token, as the run's optimizer would scale it."""

    change: list[Tensor]
    """One for each trained parameter; the token's log-probability rises by STEP along it."""
    unit: float
    """What a slope along `change` is multiplied with, to be one of log-odds for an update of size 1."""


class RunWeights:
    """The model of a run, and its folders by step; 0 is the model that the training began with.

    With an adapter the frozen weights are float32, so that a small change of a log-probability is not rounded away.
    """

    def __init__(self, store: Store, run: RunRow, base: Path) -> None:
        config, _ = load_config((), (), os.environ, base=base, run=run.config)
        if config.model.quantization == "none":
            config = config.replace(model={"dtype": "float32"})
        self.config = config
        folder = model_folder(run.model, config.model, base=base, store=store)
        settings = PolicySettings.of(config)
        self.model = load_weights(folder, run.model, settings, base=base, trainable=True)
        self.model.eval()
        self.trained = trainable(self.model)
        self._first = [p.detach().clone() for p in self.trained]
        found = [c for c in store.runs.checkpoints(run.id) if Path(c.path).is_dir()]
        self.folders: dict[int, Path | None] = {0: None}
        self.folders |= {c.step: Path(c.path) for c in sorted(found, key=lambda c: c.step)}

    @torch.no_grad()
    def put(self, step: int) -> None:
        """Give the model the weights after a step of `folders`. Raises DamagedCheckpoint."""
        folder = self.folders[step]
        if folder is not None:
            return put_weights(self.model, folder)
        for weight, first in zip(self.trained, self._first, strict=True):
            weight.copy_(first)

    def logp(self, segment: Segment) -> Tensor:
        """Return the log-probability of the one token that a segment trains, with its graph."""
        packed = pack([[segment]])
        return logprobs(self.model, packed, temperature=self.config.rollout.temperature).logp[0]

    def direction(self, segment: Segment, optimizer: int) -> Direction:
        """Return how the weights would have to change, seen from those that the model has, for its token to rise.

        `optimizer`: the step whose optimizer scales it, as AdamW does each parameter's gradient by its usual size.
        """
        logp = self.logp(segment)
        grads = torch.autograd.grad(logp, self.trained, allow_unused=True)
        slope = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(self.trained, grads, strict=True)
        ]
        scales = self._scales(optimizer)
        change = [g * scale for g, scale in zip(slope, scales, strict=True)]
        length = sum(float((g * c).sum()) for g, c in zip(slope, change, strict=True))
        odds = length / max(-float(torch.expm1(logp.detach())), 1e-6) / STEP
        return Direction([c * (STEP / max(length, 1e-30)) for c in change], odds)

    def _scales(self, step: int) -> list[Tensor | float]:
        """Return 1 / (√v + ε) of each parameter after a step, 0 where it has not had a gradient yet.

        It is 1 for other optimizers than AdamW.
        """
        kept = self._optimizer(step)
        state = kept.get("state", {})
        beta = kept["param_groups"][0]["betas"][1] if state and "param_groups" in kept else 0.0
        fits = len(state) == len(self.trained) and all(
            getattr(state[n].get("exp_avg_sq"), "shape", None) == p.shape
            for n, p in enumerate(self.trained)
        )
        if not fits:
            return [1.0] * len(self.trained)
        sizes = [
            (state[n]["exp_avg_sq"].to(p) / (1 - beta ** float(state[n]["step"]))).sqrt()
            for n, p in enumerate(self.trained)
        ]
        return [torch.where(size > 0, 1 / (size + 1e-8), 0.0) for size in sizes]

    def momentum(self, step: int) -> float:
        """Return how much of AdamW's momentum is left after a training step; 0 for other optimizers."""
        kept = self._optimizer(step)
        state, groups = kept.get("state"), kept.get("param_groups")
        if not state or not groups or "betas" not in groups[0]:
            return 0.0
        updates = float(state[0]["step"]) / step
        return float(np.power(groups[0]["betas"][0], updates))

    def _optimizer(self, step: int) -> dict[str, Any]:
        """Return the stored state of the optimizer after a step; empty for the model it began with."""
        folder = self.folders[step]
        kept: dict[str, Any] = {} if folder is None else load_state(folder).get("optimizer", {})
        return dict(kept.get("inner", kept))

    @torch.no_grad()
    def slopes(self, tables: Sequence[StepTable], toward: Direction) -> list[NDArray[np.float64]]:
        """[N] of each table: by how much the log-odds of the direction's token rise where a step raises each token's.

        It is the dot product of both gradients, measured by two forwards with changed weights in place of a backward
        pass for each group. The weights stay changed: `put` restores them.
        """
        self._move(toward.change, 1.0)
        up = [self._logprobs(table) for table in tables]
        self._move(toward.change, -2.0)
        down = [self._logprobs(table) for table in tables]
        return [(u - d) / 2 * toward.unit for u, d in zip(up, down, strict=True)]

    def _move(self, change: Sequence[Tensor], by: float) -> None:
        for weight, one in zip(self.trained, change, strict=True):
            weight.add_(one, alpha=by)

    def _logprobs(self, table: StepTable) -> NDArray[np.float64]:
        out = np.zeros(int(table.offsets[-1]))
        bundles = [n for n, bundle in enumerate(table.bundles) if bundle]
        segments = table.segments(bundles)
        rows = Rows(self.config.train.token_budget, switch=switch_length(self.model))
        for row in rows.of(segments):
            packed = pack(select_segments(segments, row))
            found = logprobs(self.model, packed, temperature=self.config.rollout.temperature)
            where = table.rows(table.bundles[bundles[b]][m] for b, m in row)
            out[where] = found.logp.double().cpu().numpy()
        return out
