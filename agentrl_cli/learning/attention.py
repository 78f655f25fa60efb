"""Attention over a packed row of episodes: each sees itself and its group's shared prefix, nothing else.

The row is laid out in blocks: a prefix that several episodes share, then each episode's own continuation. No
[T, T] mask exists: on the CPU every piece is one call of the flash kernel and the two halves of a continuation's
attention (to the prefix, to itself) are merged by their log-sum-exp, whose gradient is exact because the kernel's
backward takes the merged one. Elsewhere, with a sliding window or with dropout, each continuation is one call of
scaled_dot_product_attention with a mask of its own size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from agentrl_cli.errors import ModelError

NAME = "agentrl_packed"
"""Under this name the function stands in transformers' AttentionInterface."""


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the row: the shared prefix [start, own), then the continuations."""

    start: int
    own: int
    """Where the prefix ends and the first continuation begins (= start where nothing is shared)."""
    ends: tuple[int, ...]
    """Where each continuation ends; the first begins at `own`, the next where the one before ended."""

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(begin, end) of each continuation that is not empty."""
        return tuple(
            (a, b) for a, b in zip((self.own, *self.ends), self.ends, strict=False) if b > a
        )


class NotPackable(ModelError):
    """This architecture mixes positions in a way that packing does not support; its episodes are padded."""


class Packing:
    """What travels through the model to its attention layers: the blocks, and how many layers asked for them."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks
        self.calls = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest stretch that attends to itself."""
        return max((end - block.start for block in self.blocks for end in block.ends), default=0)


def packed_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention function that transformers calls: q [1, H, T, d], k and v [1, H_kv, T,
    d] -> [1, T, H, d].
    """
    if packing is None:
        raise NotPackable(
            f"{type(module).__name__} does not hand keyword arguments to its attention"
        )
    odd = [n for n in ("softcap", "s_aux", "position_bias") if kwargs.get(n) is not None]
    if odd:
        raise NotPackable(f"{type(module).__name__} uses {odd[0]} in its attention")
    packing.calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    windowed = sliding_window is not None and sliding_window < packing.longest
    same_width = query.shape[-1] == value.shape[-1]
    # torch's flash kernel for CPUs is a private operator; _masked_blocks is the public way.
    kernel = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
    if kernel and query.device.type == "cpu" and same_width and not windowed and dropout == 0.0:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out: Tensor = _FlashBlocks.apply(query, key, value, packing.blocks, scale)  # type: ignore[no-untyped-call]  # torch's
    else:
        out = _masked_blocks(
            query, key, value, packing.blocks, scale, dropout, sliding_window if windowed else None
        )
    return out.transpose(1, 2).contiguous(), None


class _FlashBlocks(torch.autograd.Function):
    """The CPU flash kernel per piece, pieces of one query merged by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        lse = torch.empty(
            q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
        )
        for queries, keys, causal in _pieces(blocks):
            o, part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, causal, scale=scale
            )
            if queries == keys:
                out[:, :, queries], lse[:, :, queries] = o, part
            else:
                _merge(out[:, :, queries], lse[:, :, queries], o, part)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys, causal in _pieces(ctx.blocks):
            a, b, c = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, queries],
                q[:, :, queries],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )
            dq[:, :, queries] += a
            dk[:, :, keys] += b
            dv[:, :, keys] += c
        return dq, dk, dv, None, None


def _pieces(blocks: tuple[Block, ...]) -> Iterator[tuple[slice, slice, bool]]:
    """(queries, keys, causal) of every kernel call; each continuation's own comes before the one to the prefix."""
    for block in blocks:
        prefix = slice(block.start, block.own)
        if block.own > block.start:
            yield prefix, prefix, True
        for begin, end in block.segments:
            yield slice(begin, end), slice(begin, end), True
        if block.own > block.start and block.ends and block.ends[-1] > block.own:
            yield slice(block.own, block.ends[-1]), prefix, False


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """In place: attention over two disjoint sets of keys from the attention over each."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(
        other, (other_lse - total).exp_().unsqueeze(-1)
    )
    lse.copy_(total)


def _masked_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: tuple[Block, ...],
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """[1, H, T, d] by one SDPA call per piece, keys of a continuation being the prefix and its own."""
    parts: list[Tensor] = []
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:  # with a mask, the memory-saving kernels want every head's own keys
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    for block in blocks:
        pieces = (
            [((block.start, block.own), (block.start, block.start))]
            if block.own > block.start
            else []
        )
        pieces += [(segment, (block.start, block.own)) for segment in block.segments]
        for (begin, end), (first, last) in pieces:
            keys, values = k[:, :, begin:end], v[:, :, begin:end]
            if last > first:
                keys = torch.cat([k[:, :, first:last], keys], 2)
                values = torch.cat([v[:, :, first:last], values], 2)
            plain = last == first and window is None
            mask = None if plain else _mask(end - begin, keys.shape[2], window, q.device)
            parts.append(
                scaled_dot_product_attention(
                    q[:, :, begin:end],
                    keys,
                    values,
                    attn_mask=mask,
                    dropout_p=dropout,
                    is_causal=plain,
                    scale=scale,
                )
            )
    return torch.cat(parts, 2)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool, True where attended: causal aligned to the end, at most `window` keys back."""
    distance = (
        torch.arange(keys - queries, keys, device=device)[:, None]
        - torch.arange(keys, device=device)[None]
    )
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
