"""Attention over the paged KV cache.

A view is what one forward works on. It is handed to a model's own forward as `past_key_values` (attention_hook.py),
stores new keys and values, and computes attention: `PrefillView` for several new tokens a sequence, `DecodeView` for
one.

In a decode step every block is attended to on its own, and the results are merged by the log-sum-exp of their scores
(https://arxiv.org/abs/2307.08691, section 3.1). No keys or values are copied for that, and a block that several
sequences share is read once. Only public operations of torch are used, the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers.cache_utils import Cache

from agentrl_cli.inference.decode_batch import Shape
from agentrl_cli.inference.kv_cache import BLOCK, BlockPool, block_tensor, blocks

MASKED = -1e30
"""Added to the scores of what is not attended to. Finite: a block without any visible place stays a number."""


class View(Cache):
    """What one forward works on: it stores new keys and values, and attends to all of a sequence's.

    Attributes:
        positions: [B, T] of the new tokens.
        calls: How many layers attended so far.
    """

    positions: Tensor
    calls: int

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(layers=[])
        self.calls = 0
        self._pool, self._layer = pool, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, heads, T, dim]. They come back as they are: attention reads the pool."""
        self._layer = layer_idx
        self._write(*self._pool.store(layer_idx, key_states, value_states), key_states, value_states)
        return key_states, value_states

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        raise NotImplementedError

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the layer updated last: query [B, H, T, d], the new keys and values [B, H_kv, T, d].

        Returns [B, H, T, d]. `window`: a position sees so many, itself included. `softcap`: scores s become
        c·tanh(s / c). `sinks` [H]: a logit per head that takes part in the softmax and has no value.
        """
        raise NotImplementedError

    def _stored(self) -> tuple[Tensor, Tensor]:
        keys, values = self._pool.keys[self._layer], self._pool.values[self._layer]
        assert keys is not None and values is not None
        return keys, values


class PrefillView(View):
    """Several new tokens of each sequence, padded on the right.

    Args:
        starts: [B] position of each sequence's first new token.
        counts: [B] how many new tokens it has.
        tables: [B] block tables that cover them.
    """

    def __init__(
        self,
        pool: BlockPool,
        starts: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        super().__init__(pool)
        self._width, self._first = max(counts), max(starts) == 0
        begins, given = (torch.tensor(column, device=device)[:, None] for column in (starts, counts))
        steps = torch.arange(self._width, device=device)[None]
        self.positions = begins + steps
        needed = [table[: blocks(start + count)] for table, start, count in zip(tables, starts, counts, strict=True)]
        self._table = block_tensor(needed, device)
        # What padding sees and where it goes is that of the last token: its results are not used, and are numbers.
        self._real = torch.minimum(self.positions, begins + given - 1)
        self._rows = (self._real - begins).clamp(min=0)
        self._block = self._table.gather(1, self._real // BLOCK)
        self._padded = min(counts) < self._width
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if self._padded:  # a place that is written twice gets the same numbers twice
            every = torch.arange(len(key), device=key.device)[:, None]
            key, value = key[every, self._rows], value[every, self._rows]
        place = self._real % BLOCK
        keys[self._block, :, :, place] = key
        values[self._block, :, place] = value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.calls += 1
        count, heads, width, dim = query.shape
        plain = softcap is None and sinks is None
        if plain and self._first and (window is None or window >= width):
            grouped = heads != key.shape[1]
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        keys, values = self._gathered()
        groups = heads // keys.shape[1]
        # The queries of all heads that share keys count as more positions of one head: keys are read once.
        q = query.reshape(count, keys.shape[1], groups * width, dim)
        mask = self._mask(window, groups, q.dtype)
        if plain:
            out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        else:
            extra = None if sinks is None else sinks.view(1, -1, groups, 1).expand(-1, -1, -1, width)
            out = explicit_attention(q, keys, values, mask, scale, softcap, extra)
        return out.reshape(count, heads, width, out.shape[-1])

    def _gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, L, dim] of whole block tables."""
        keys, values = self._stored()
        count, each = self._table.shape
        found = []
        for store in (keys.transpose(2, 3), values):
            rows = store.index_select(0, self._table.view(-1)).view(count, each, store.shape[1], BLOCK, -1)
            found.append(rows.transpose(1, 2).reshape(count, store.shape[1], each * BLOCK, -1))
        return found[0], found[1]

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, groups · T, L] to be added to the scores."""
        name = (window, groups, dtype)
        mask = self._masks.get(name)
        if mask is None:
            places = torch.arange(self._table.shape[1] * BLOCK, device=self._table.device)[None, None]
            hidden = places > self._real[:, :, None]
            if window is not None:
                hidden |= places <= self._real[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            mask = mask.repeat(1, groups, 1)[:, None]
            self._masks[name] = mask
        return mask


class DecodeView(View):
    """One new token of each sequence.

    Args:
        tensors: Those of a DecodeBatch, in order.
        in_place: See DecodeBatch.
        read: By layer, keys and values of just these shared blocks as an earlier step read them.
    """

    def __init__(
        self,
        pool: BlockPool,
        tensors: Sequence[Tensor],
        shape: Shape,
        in_place: bool,
        read: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(pool)
        self._read_before = {} if read is None else read
        _, positions, write, self._blocks, self._owner, begins, held, *several, parts = tensors
        self._shared, shared_begins, members = several
        self._shape, self._in_place = shape, in_place
        self.positions = positions[:, None]
        self._block, self._place = write // BLOCK, write % BLOCK
        self._begins, self._held, self._shared_begins = begins[:, None], held[:, None], shared_begins
        self._members, self._parts = members.view(-1), parts
        self._merge: Tensor | None = None
        self._results: tuple[Tensor, Tensor, Tensor] | None = None
        self._masks: dict[int | None, tuple[Tensor, Tensor | None]] = {}

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        keys[self._block, :, :, self._place] = key[:, :, 0]
        values[self._block, :, self._place] = value[:, :, 0]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.calls += 1
        rows, heads, _, dim = query.shape
        keys, values = self._stored()
        kv_heads, groups = keys.shape[1], heads // keys.shape[1]
        shape = self._shape
        own_mask, shared_mask = self._mask(window)
        flat = (query[:, :, 0] * scale).reshape(rows, heads * dim)
        own = flat.index_select(0, self._owner).view(-1, groups, dim)
        out, best, total = self._buffers(heads, values)
        split = shape.blocks * heads
        pair = (keys, values) if self._in_place else self._gathered(keys, values)
        count = shape.blocks * kv_heads
        pair = pair[0].flatten(0, 1)[:count], pair[1].flatten(0, 1)[:count]
        _attend(own, *pair, own_mask, softcap, out[:split], best[:split], total[:split])
        if shape.shared:
            several = flat.index_select(0, self._members).view(shape.shared, shape.members, kv_heads, groups * dim)
            several = several.transpose(1, 2).reshape(shape.shared * kv_heads, shape.members * groups, dim)
            found = out[split:-1], best[split:-1], total[split:-1]
            _attend(several, *self._shared_read(keys, values), shared_mask, softcap, *found)
        return self._merged(kv_heads, groups, sinks).view(rows, heads, 1, -1).to(query.dtype)

    def _gathered(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.index_select(0, self._blocks), values.index_select(0, self._blocks)

    def _shared_read(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [entries · heads, dim, BLOCK] and values [entries · heads, BLOCK, dim] of shared blocks.

        A full block does not change: what the step before read is used again if it was of the same blocks.
        """
        found = self._read_before.get(self._layer)
        if found is None:
            found = keys.index_select(0, self._shared).flatten(0, 1), values.index_select(0, self._shared).flatten(0, 1)
            self._read_before[self._layer] = found
        return found

    def _buffers(self, heads: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For all parts: Σ p·v [parts · heads + 1, dim], the best score and Σ p. The last one is nobody's."""
        if self._results is None:
            exact = torch.promote_types(values.dtype, torch.float32)
            count = (self._shape.blocks + self._shape.shared * self._shape.members) * heads + 1
            sums = values.new_zeros(count, values.shape[-1], dtype=exact)
            self._results = sums, values.new_full((count,), 2 * MASKED, dtype=exact), sums.new_zeros(count)
        return self._results

    def _merged(self, kv_heads: int, groups: int, sinks: Tensor | None) -> Tensor:
        """[rows · heads, dim] of each sequence over all of its parts."""
        assert self._results is not None
        out, best, total = self._results
        where = self._where(kv_heads, groups)
        tops = best[where]
        highest = tops.amax(-1, keepdim=True)
        weights = tops.sub_(highest).exp_()
        whole = total[where].mul_(weights).sum(-1, keepdim=True)
        if sinks is not None:
            whole += (sinks.to(whole.dtype).repeat(self._shape.rows)[:, None] - highest).exp_()
        return embedding_bag(where, out, mode="sum", per_sample_weights=weights.div_(whole))

    def _where(self, kv_heads: int, groups: int) -> Tensor:
        """[rows · heads, parts] where the results of each head's parts lie, by the orders that `_attend` writes in."""
        if self._merge is None:
            heads, shape, parts = kv_heads * groups, self._shape, self._parts
            kv = torch.arange(kv_heads, device=parts.device)[None, :, None, None]
            group = torch.arange(groups, device=parts.device)[None, None, :, None]
            part = parts[:, None, None]
            own = (part * kv_heads + kv) * groups + group
            entry, member = (part - shape.blocks) // shape.members, (part - shape.blocks) % shape.members
            several = shape.blocks * heads + ((entry * kv_heads + kv) * shape.members + member) * groups + group
            nobody = (shape.blocks + shape.shared * shape.members) * heads
            where = torch.where(part < shape.blocks, own, several).masked_fill_(part < 0, nobody)
            self._merge = where.view(shape.rows * heads, -1)
        return self._merge

    def _mask(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        """To be added to scores: of own blocks [blocks, 1, 1, BLOCK], of shared ones [shared, 1, members, BLOCK]."""
        found = self._masks.get(window)
        if found is None:
            place = torch.arange(BLOCK, device=self._held.device)[None]
            hidden = place >= self._held
            shared = None
            if window is not None:
                position = self.positions[:, 0]
                hidden |= place + self._begins <= position[self._owner][:, None] - window
                shared = self._shared_mask(place, position, window)
            found = self._masks[window] = (hidden * MASKED)[:, None, None], shared
        return found

    def _shared_mask(self, place: Tensor, position: Tensor, window: int) -> Tensor | None:
        """Shared blocks are full; of their members each may see another part of them."""
        if not self._shape.shared:
            return None
        members = self._members.view(self._shape.shared, -1)
        begins = self._shared_begins[:, None, None]
        hidden = place[None] + begins <= position[members][:, :, None] - window
        return (hidden * MASKED)[:, None]


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    out: Tensor,
    best: Tensor,
    total: Tensor,
) -> None:
    """Queries [N, Q, d] meet one block each: the best score, Σ exp(s - best) and Σ exp(s - best)·v of each query."""
    scores = torch.bmm(query, keys).to(out.dtype)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        count, _, members, width = mask.shape
        scores.view(count, -1, members, scores.shape[1] // members, width).add_(mask[:, :, :, None])
    rows = scores.shape[:2]
    weights = scores.sub_(torch.amax(scores, -1, keepdim=True, out=best.view(*rows, 1))).exp_()
    torch.sum(weights, -1, out=total.view(rows))
    into = out.view(*rows, -1)
    if values.dtype == out.dtype:
        torch.bmm(weights, values, out=into)
    else:
        into.copy_(torch.bmm(weights.to(values.dtype), values))


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out, in float32: q [n, H, Q, d], k and v [n, H, L, d], mask broadcast to [n, H, Q, L].

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
