"""A reference for the KL term that follows the trained weights: their moving average (`algo.kl.ref_ema`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class MovingReference:
    """The average of the trained weights alone; frozen ones are the model's own. It begins as the model does.

    After every `steps` steps: average ← (1 − share) · average + share · weights, as TRL's `sync_ref_model`
    (https://arxiv.org/abs/2404.09656). Works for adapters as for whole models, without a second model.
    """

    def __init__(self, trained: Sequence[nn.Parameter], share: float, steps: int) -> None:
        self.trained = trained
        self.share = share
        self.steps = steps
        self.seen = 0
        # A sixteen-bit average would not move by small shares.
        self.weights = [
            one.detach().to(torch.promote_types(one.dtype, torch.float32), copy=True)
            for one in trained
        ]

    def follow(self) -> None:
        """A step was trained."""
        self.seen += 1
        if self.seen % self.steps == 0:
            for average, now in zip(self.weights, self.trained, strict=True):
                average.lerp_(now.detach().to(average.dtype), self.share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Yield the model computes with the average."""
        now = [one.detach().clone() for one in self.trained]
        self._write(self.weights)
        try:
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def _write(self, weights: Sequence[Tensor]) -> None:
        for one, value in zip(self.trained, weights, strict=True):
            one.copy_(value)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"seen": self.seen, "weights": self.weights}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.seen = int(state["seen"])
        for own, kept in zip(self.weights, state["weights"], strict=True):
            own.copy_(kept)
