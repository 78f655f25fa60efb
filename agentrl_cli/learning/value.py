"""PPO's value head: a small network on the policy's hidden states that estimates the return, and how it is trained.

The state before a trained token is the hidden state that the token is predicted from, so the policy's own forward,
packed and shared, is the critic's too. Not here: advantages from values (turn_advantages.gae).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from agentrl_cli.config.estimators import Gae


class ValueHead(nn.Module):
    """[M, D] hidden states to [M] values, float32: one hidden layer, and 0 everywhere at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, states: Tensor) -> Tensor:
        values: Tensor = self.out(torch.tanh(self.inner(states.float())))[:, 0]
        return values


class Critic:
    """A value head with its optimizer. `value_coef` sets how much of its loss reaches the policy's weights."""

    def __init__(self, width: int, settings: Gae, *, device: torch.device | str = "cpu") -> None:
        self.settings = settings
        self.head = ValueHead(width).to(device)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=settings.value_lr, weight_decay=0.0
        )

    def values(self, states: Tensor) -> Tensor:
        """[M] values; the gradient into `states` is scaled by `value_coef`."""
        c = self.settings.value_coef
        return self.head(states.detach() if not c else c * states + (1 - c) * states.detach())  # type: ignore[no-any-return]

    def loss(
        self, values: Tensor, old: Tensor, returns: Tensor, tokens: int
    ) -> tuple[Tensor, dict[str, float]]:
        """This micro-batch's part of the mean over the mini-batch's `tokens`; and its metrics, which add up."""
        clip, n = self.settings.value_clip, max(tokens, 1)
        each, held = value_loss(values, old, returns, clip)
        loss = each.sum() / n
        metrics = {"value/loss": float(loss.detach()), "value/clip_ratio": float(held.sum()) / n}
        return loss, metrics | {
            "value/mean": float(old.sum()) / n,
            "value/returns_mean": float(returns.sum()) / n,
        }

    def step(self, factor: float, max_norm: float) -> None:
        """An optimizer step at `factor` × `value_lr`, the gradient's norm held as the policy's is."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.value_lr * factor
        nn.utils.clip_grad_norm_(self.head.parameters(), max_norm)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])


def value_loss(
    value: Tensor, old: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """[M] ½ max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²), and bool where the second is the larger.

    There the loss counts and passes no gradient (verl's vf_clipfrac). https://arxiv.org/abs/2005.12729
    """
    loss = (value - returns).square()
    if clip is None:
        return 0.5 * loss, torch.zeros_like(value, dtype=torch.bool)
    bounded = (old + (value - old).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(loss, bounded), bounded.detach() > loss.detach()


def explained_variance(value: Tensor, returns: Tensor) -> float:
    """1 − Var(R − V) / Var(R): 1 is perfect, 0 no better than a constant; NaN where the returns do not vary."""
    spread = returns.var(correction=0)
    return (
        float(1 - (returns - value).var(correction=0) / spread)
        if float(spread) > 0
        else float("nan")
    )
