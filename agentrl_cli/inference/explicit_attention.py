"""Attention with soft caps and sinks, which torch has no function for."""

from __future__ import annotations

import torch
from torch import Tensor


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention written out, in float32: q [n, H, Q, d], k and v [n, H, L, d], mask broadcast to [n, H, Q, L].

    `sinks` [1, H, …] has a logit per query: it takes its share of the softmax and gives no value
    (https://arxiv.org/abs/2309.17453, as gpt-oss does it).
    """
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        column = sinks.reshape(1, q.shape[1], q.shape[2], 1).expand(q.shape[0], -1, -1, -1).float()
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]].to(v.dtype)
    return torch.matmul(weights, v)
