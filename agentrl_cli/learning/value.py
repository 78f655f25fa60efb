"""PPO's value head: a small network on the policy's hidden states that foretells the return, and its optimizer.

The state before a trained token is the hidden state that the token is predicted from, so the policy's own forward,
packed and shared, is the critic's too. Not here: advantages from values (credit.gae) and the loss per token
(terms.value_loss).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.learning.terms import value_held, value_loss


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
    """A value head with its optimizer. `algo.value_coef` says how much of its loss reaches the policy's weights."""

    def __init__(self, width: int, algo: AlgoConfig, *, device: torch.device | str = "cpu") -> None:
        self.algo = algo
        self.head = ValueHead(width).to(device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=algo.value_lr, weight_decay=0.0)

    def values(self, states: Tensor) -> Tensor:
        """[M] values; the gradient that goes on into `states` is weighed with `value_coef`."""
        c = self.algo.value_coef
        return self.head(states.detach() if not c else c * states + (1 - c) * states.detach())  # type: ignore[no-any-return]

    def loss(self, values: Tensor, old: Tensor, returns: Tensor, tokens: int) -> tuple[Tensor, dict[str, float]]:
        """This micro-batch's part of the mean over the mini-batch's `tokens`; and its metrics, which add up."""
        clip, n = self.algo.value_clip, max(tokens, 1)
        loss = value_loss(values, old, returns, clip).sum() / n
        held = float(value_held(values.detach(), old, returns, clip).sum()) / n
        metrics = {"value/loss": float(loss.detach()), "value/clip_ratio": held}
        return loss, metrics | {"value/mean": float(old.sum()) / n, "value/returns_mean": float(returns.sum()) / n}

    def step(self, factor: float, max_norm: float) -> None:
        """An optimizer step at `factor` × `value_lr`, the gradient's norm held as the policy's is."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.algo.value_lr * factor
        nn.utils.clip_grad_norm_(self.head.parameters(), max_norm)
        self.optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
