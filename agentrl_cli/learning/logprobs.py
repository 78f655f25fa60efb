"""Log-probabilities and entropies of given tokens from hidden states, in chunks: no [T, V] tensor stays alive.

A chunk's logits are made, used and dropped. Under a head that is trained they are made again in the backward pass,
where the gradient is written down rather than recorded; under a frozen one the gradient of the hidden states is made
with them (https://github.com/linkedin/Liger-Kernel and https://arxiv.org/abs/2411.09009 do the same).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl_cli.learning.fused_layer import product
from agentrl_cli.types import Support

_CHUNK_NUMBERS = 2**24
NEVER = -1e30
"""The logit of a token that could not be drawn: its probability is 0, and 0 times it is 0."""


def head_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [M, D], targets [M] -> log-probability [M] of the targets and entropy [M] in nats, both at least float32.

    `chunk` rows of logits are alive at a time; None: 256, fewer where the vocabulary is large (64 MB a chunk).
    A plain linear head takes the written-down backward; any other module (an adapter on the head, quantised weights,
    soft-capped logits) is recomputed under checkpointing, with the same memory. `support` [M]: the ids that each target
    was drawn from; both numbers are then those of the distribution over them.
    """
    if chunk is None:
        chunk = max(16, min(256, _CHUNK_NUMBERS // int(getattr(head, "out_features", 1))))
    if type(head) is nn.Linear and softcap is None:
        both: tuple[Tensor, Tensor] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's
            hidden, head.weight, head.bias, targets, temperature, chunk, support
        )
        return both
    parts = [slice(start, start + chunk) for start in range(0, len(targets), chunk)]
    found = [
        checkpoint(
            _module_chunk,
            *(head, hidden[part], targets[part], temperature, softcap),
            None if support is None else support[part],
            use_reentrant=False,
        )
        for part in parts
    ]
    empty = hidden.new_zeros(0, dtype=_precise(hidden))
    logp = torch.cat([empty, *(one for one, _ in found)])
    return logp, torch.cat([empty, *(one for _, one in found)])


def _module_chunk(
    head: nn.Module,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    support: Support | None,
) -> tuple[Tensor, Tensor]:
    logits = head(rows).to(_precise(rows))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logit_logprobs(logits / temperature, targets, support)


def logit_logprobs(
    logits: Tensor, targets: Tensor, support: Support | None
) -> tuple[Tensor, Tensor]:
    """logits [M, V], targets [M] -> log-probability [M] of the targets and entropy [M]; `support` as above."""
    if support is not None:
        logits = logits.masked_fill(outside(support, logits), NEVER)
    every = torch.log_softmax(logits, -1)
    entropy = -(every.exp() * every.clamp(min=-1e4)).sum(-1)
    return every.gather(-1, targets[:, None])[:, 0], entropy


class _LinearLogprobs(torch.autograd.Function):
    """log softmax(hidden Wᵀ + b)[target] and the entropy, chunk by chunk in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(len(targets), dtype=_precise(hidden), device=hidden.device)
        entropy, lse = torch.empty_like(logp), torch.empty_like(logp)
        # A frozen head: the gradient of log p by the hidden state is made here, from the logits that are there anyway.
        slope = (
            torch.empty_like(hidden) if ctx.needs_input_grad[:3] == (True, False, False) else None
        )
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _logits(
                hidden[part], weight, bias, temperature, None if support is None else support[part]
            )
            picked = logits.gather(-1, targets[part, None])[:, 0]
            top = logits.amax(-1)
            powers = (logits - top[:, None]).exp_()
            mass = powers.sum(-1)
            lse[part] = total = top + mass.log()
            logp[part] = picked - total
            entropy[part] = total - torch.einsum("tv,tv->t", powers, logits) / mass
            if slope is not None:
                powers.div_(mass[:, None]).neg_()
                powers.scatter_add_(-1, targets[part, None], torch.ones_like(mass)[:, None])
                slope[part] = product(powers.div_(temperature).to(hidden.dtype), weight.T)
            del logits, powers  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, slope)
        ctx.temperature, ctx.chunk, ctx.support = temperature, chunk, support
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, bias, targets, lse, entropy, slope = ctx.saved_tensors
        has_entropy = bool(grad_entropy.any())
        if slope is not None and not has_entropy:
            return (slope * grad_logp[:, None]).to(hidden.dtype), *(None,) * 6
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight) if wants_weight else None
        d_bias = torch.zeros_like(bias) if wants_bias and bias is not None else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            support = None if ctx.support is None else ctx.support[part]
            every = _logits(hidden[part], weight, bias, ctx.temperature, support).sub_(
                lse[part, None]
            )
            d_logits = torch.exp(every) if has_entropy else every.exp_()
            # dlogp/dz = onehot − p and dH/dz = −p (log p + H), times the incoming gradients
            factor = grad_logp[part, None]
            if has_entropy:
                factor = every.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(factor)
            d_logits.mul_(factor).neg_()
            d_logits.scatter_add_(-1, targets[part, None], grad_logp[part, None])
            d_logits = d_logits.div_(ctx.temperature).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                d_weight.addmm_(d_logits.T, hidden[part])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, *(None,) * 4


def outside(support: Support, logits: Tensor) -> Tensor:
    """[chunk, V] bool: the tokens that could not be drawn."""
    sets = [(row, ids) for row, ids in enumerate(support) if ids is not None]
    found = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    if sets:
        rows = np.repeat([row for row, _ in sets], [len(ids) for _, ids in sets])
        where = torch.from_numpy(
            np.stack([rows, np.concatenate([ids for _, ids in sets])]).astype(np.int64)
        )
        found[torch.tensor([row for row, _ in sets], device=logits.device)] = True
        found[tuple(where.to(logits.device))] = False
    return found


def _logits(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    support: Support | None = None,
) -> Tensor:
    """[chunk, V] float32, divided by the temperature: the only vocabulary-sized tensor there is."""
    times = torch.nn.functional.linear if weight.requires_grad else product
    logits = times(rows, weight, bias).to(_precise(rows))
    logits = logits if temperature == 1.0 else logits.div_(temperature)
    return logits if support is None else logits.masked_fill_(outside(support, logits), NEVER)


def _precise(x: Tensor) -> torch.dtype:
    """float32, or float64 where the model is."""
    return torch.promote_types(x.dtype, torch.float32)
