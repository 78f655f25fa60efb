"""Drawing tokens from logits, one row per episode, each with its own random numbers.

A row's draw depends on its own logits and its own seed alone: `uniforms` are made from the seed when the turn starts,
and token n of the turn uses number n, whatever else is in the batch. The logits themselves may differ in the last bits
with the batch's shape, so equal seeds give equal text as far as that arithmetic allows (exactly, with fixed lanes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from agentrl_cli.types import TOP_K, Sampling


@dataclass(slots=True)
class Draw:
    """One sampled token per row; all [rows] but the top ones, which are [rows, TOP_K]."""

    ids: torch.Tensor
    logp_sampled: torch.Tensor
    logp_policy: torch.Tensor
    entropy: torch.Tensor
    top_ids: torch.Tensor
    top_logps: torch.Tensor


def uniforms(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[count] float64 in [0, 1), a function of the seed alone."""
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count)


def draw(logits: torch.Tensor, samplings: list[Sampling], numbers: torch.Tensor) -> Draw:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary], any float dtype.
        samplings: One per row.
        numbers: [rows] float64 uniforms; inverse-CDF sampling, so one number decides one token.
    """
    logits = logits.float()
    temperature = torch.tensor([s.temperature if s.temperature > 0 else 1.0 for s in samplings], device=logits.device)
    logp = torch.log_softmax(logits / temperature[:, None], dim=-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)
    drawn_logp = logp
    if any(s.truncated for s in samplings):
        drawn_logp = _truncate(logp, samplings)
    ids = _invert(drawn_logp.exp(), numbers)
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    if bool(greedy.any()):
        ids = torch.where(greedy, logits.argmax(-1), ids)
    top_logps, top_ids = logp.topk(min(TOP_K, logp.shape[-1]), dim=-1)
    sampled = drawn_logp.gather(1, ids[:, None])[:, 0]
    # A greedy choice is certain under the distribution that was really sampled.
    sampled = torch.where(greedy, torch.zeros_like(sampled), sampled)
    return Draw(ids, sampled, logp.gather(1, ids[:, None])[:, 0], entropy, top_ids, top_logps)


def _invert(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token whose cumulative probability first exceeds the row's number, by float64 sums."""
    cumulative = probs.double().cumsum(-1)
    target = numbers[:, None].to(cumulative.device) * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return ids.clamp_(max=probs.shape[-1] - 1)


def _truncate(logp: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Keep the top-k tokens, then the smallest set of mass top-p, and renormalise. −inf elsewhere."""
    ordered, order = logp.sort(dim=-1, descending=True)
    rank = torch.arange(logp.shape[-1], device=logp.device)[None]
    top_k = torch.tensor([s.top_k or logp.shape[-1] for s in samplings], device=logp.device)[:, None]
    kept = ordered.masked_fill(rank >= top_k, -torch.inf)
    kept = kept - kept.logsumexp(-1, keepdim=True)
    before = kept.exp().cumsum(-1) - kept.exp()
    top_p = torch.tensor([s.top_p for s in samplings], device=logp.device)[:, None]
    kept = kept.masked_fill((before >= top_p) & (rank > 0), -torch.inf)
    kept = kept - kept.logsumexp(-1, keepdim=True)
    return torch.full_like(logp, -torch.inf).scatter(1, order, kept)
