"""Muon: momentum whose matrices are made orthogonal before they are added. https://kellerjordan.github.io/posts/muon/

torch.optim.Muon, which this equals but for rounding, orthogonalizes one matrix after the other in bfloat16. A
processor without bfloat16 units takes ten times as long for that as in float32: nearly half of a small model's step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, chosen for the steepest slope at zero (the page above)."""
ITERATIONS = 5
TOGETHER = 2**22
"""Elements of the matrices that are orthogonalized at once, which bounds the memory for copies of them."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return [N, A, B] with all singular values near 1: in float32 on a CPU, else in bfloat16."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x: Tensor = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    x = x if wide else x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for matrices [A, B]; matrices of one shape are orthogonalized together.

    `match_rms` scales updates to AdamW's size (https://arxiv.org/abs/2502.16982); else tall matrices by sqrt(A / B).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        match_rms: bool = False,
    ) -> None:
        given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, given)
        self._match_rms = match_rms

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient. Returns what `closure`, which computes gradients, returns."""
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[tuple(p.shape)].append(p)
            for (rows, columns), found in alike.items():
                size = max(1.0, rows / columns) ** 0.5
                if self._match_rms:
                    size = 0.2 * math.sqrt(max(rows, columns))
                count = max(1, TOGETHER // (rows * columns))
                for some in (found[at : at + count] for at in range(0, len(found), count)):
                    updates = torch.stack([self._nesterov(p, group["momentum"]) for p in some])
                    for p, update in zip(some, orthogonalize(updates), strict=True):
                        p.mul_(1 - group["lr"] * group["weight_decay"])
                        p.add_(update, alpha=-group["lr"] * size)
        return loss

    def _nesterov(self, p: nn.Parameter, momentum: float) -> Tensor:
        """Return the gradient [A, B] moved towards its running mean, which is updated."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        mean: Tensor = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(mean, momentum)
