"""Optimizers by name: AdamW, with 8-bit or offloaded state, and Muon. All are driven through `param_groups`' `lr`.

To add one: a branch of `make_optimizer` and a name in `train.optimizer`.

Muon is momentum whose matrices are made orthogonal before they are added: https://kellerjordan.github.io/posts/muon/
torch.optim.Muon, which ours equals but for rounding, orthogonalizes one matrix after the other in bfloat16. A
processor without bfloat16 units takes ten times as long for that as in float32: nearly half of a small model's step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from agentrl_cli.config.train import TrainConfig
from agentrl_cli.errors import ConfigError
from agentrl_cli.models.device import check_8bit

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


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What requires a gradient. Raises ConfigError if nothing does."""
    found = [p for p in model.parameters() if p.requires_grad]
    if not found:
        raise ConfigError(
            "Nothing is trainable: all weights are frozen and the model has no adapter."
        )
    return found


def learning_rate(train: TrainConfig, step: int) -> float:
    """Linear warm-up, then constant, or linear or cosine decay to zero at the last step."""
    if step < train.schedule.warmup_steps:
        return train.lr * (step + 1) / train.schedule.warmup_steps
    done = (step - train.schedule.warmup_steps) / max(1, train.steps - train.schedule.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0))),
    }
    return train.lr * max(0.0, factor[train.schedule.name])


def make_optimizer(model: nn.Module, settings: TrainConfig) -> Any:
    """Return the optimizer that `train.optimizer` names. Raises EnvironmentProblem for one that is not available."""
    weights, kind = trainable(model), settings.optimizer
    given: dict[str, Any] = {"lr": settings.lr, "weight_decay": kind.weight_decay}
    if kind.name == "muon":
        return _muon(model, given, kind.betas)
    if kind.name == "adamw_offload":
        return OffloadedAdamW(weights, betas=kind.betas, **given)
    if kind.name == "adamw":
        return torch.optim.AdamW(weights, betas=kind.betas, **given)
    check_8bit(weights[0].device)
    from bitsandbytes.optim import AdamW8bit  # state in 8 bits, https://arxiv.org/abs/2110.02861

    return AdamW8bit(weights, betas=kind.betas, **given)


class OffloadedAdamW:
    """AdamW whose state, and a float32 copy of the weights, lie in the CPU's memory; the step is made there.

    With float32 weights its numbers are AdamW's; with 16-bit weights the copy keeps the part that small steps lose.
    The GPU holds weights and gradients alone.
    """

    def __init__(self, weights: Sequence[nn.Parameter], **settings: Any) -> None:
        self.weights = list(weights)
        self.copies = [
            nn.Parameter(p.detach().to("cpu", torch.float32, copy=True)) for p in self.weights
        ]
        self.inner = torch.optim.AdamW(self.copies, **settings)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the copies: setting `lr` here sets it."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Gradients down, AdamW there, weights up."""
        for weight, copy in zip(self.weights, self.copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.to("cpu", torch.float32)
        self.inner.step()
        for weight, copy in zip(self.weights, self.copies, strict=True):
            weight.copy_(copy)
            copy.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None if set_to_none or weight.grad is None else weight.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """AdamW's own, and the copies: a checkpoint's 16-bit weights have less."""
        return {"inner": self.inner.state_dict(), "copies": [copy.detach() for copy in self.copies]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        for weight, copy, kept in zip(self.weights, self.copies, state["copies"], strict=True):
            copy.copy_(kept)
            weight.copy_(kept)


class Several:
    """Optimizers for parts of a model, stepped together."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for one, kept in zip(self.optimizers, state["parts"], strict=True):
            one.load_state_dict(kept)


def move_state(optimizer: Any, device: torch.device | str) -> None:
    """Move the state of one of torch's optimizers, or of several, to a device; counts of steps stay where they are."""
    for one in optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]:
        for state in one.state.values():
            state |= {
                name: t.to(device) for name, t in state.items() if isinstance(t, Tensor) and t.ndim
            }


def hidden_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained matrices of the hidden layers, which Muon is for, and the other trained parameters."""
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, p in model.named_parameters():
        if p.requires_grad:
            found[p.ndim != 2 or "embed" in name or "head" in name].append(p)
    return found


def _muon(model: nn.Module, given: Mapping[str, Any], betas: tuple[float, float]) -> Several:
    """Muon for the matrices of the hidden layers, AdamW for the rest. https://kellerjordan.github.io/posts/muon/

    Updates are scaled to AdamW's size (https://arxiv.org/abs/2502.16982), so one learning rate does for both.
    """
    inner, rest = hidden_matrices(model)
    parts: list[torch.optim.Optimizer] = []
    if inner:
        parts.append(Muon(inner, match_rms=True, **given))
    if rest:
        parts.append(torch.optim.AdamW(rest, betas=betas, **given))
    return Several(parts)
