"""Attention over the paged KV cache.

A view is what one forward works on. It is handed to a model's own forward as its cache, stores new keys and
values, and computes attention: `PrefillView` for several new tokens a sequence, `DecodeView` (decode_attention.py) for
one. Only public operations of torch are used, the same on every device.

`paged_attention` is the function that transformers calls in place of its own. It honours causality, sliding windows,
soft caps and sinks, and raises NotServed on anything else, so that no model is run wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from agentrl_cli.errors import ModelError
from agentrl_cli.inference.kv_cache import BLOCK, BlockPool, NotServed, block_tensor, blocks

NAME = "agentrl_paged"
"""Under this name the function stands in transformers' AttentionInterface."""
_INERT = {
    "cache_position", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "logits_to_keep", "is_causal", "position_embeddings", "num_items_in_batch", "output_router_logits",
    "num_logits_to_keep", "labels", "inputs_embeds", "attn_implementation",
}  # fmt: skip
"""What models hand to their attention functions that does not change the attention of a causal row."""


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
        self._write(
            *self._pool.store(layer_idx, key_states, value_states), key_states, value_states
        )
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

    def _layer_cache(self) -> tuple[Tensor, Tensor]:
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
        begins, given = (
            torch.tensor(column, device=device)[:, None] for column in (starts, counts)
        )
        steps = torch.arange(self._width, device=device)[None]
        self.positions = begins + steps
        needed = [
            table[: blocks(start + count)]
            for table, start, count in zip(tables, starts, counts, strict=True)
        ]
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
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
            )
        keys, values = self._gather_blocks()
        groups = heads // keys.shape[1]
        # The queries of all heads that share keys count as more positions of one head: keys are read once.
        q = query.reshape(count, keys.shape[1], groups * width, dim)
        mask = self._mask(window, groups, q.dtype)
        if plain:
            out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        else:
            extra = (
                None if sinks is None else sinks.view(1, -1, groups, 1).expand(-1, -1, -1, width)
            )
            out = explicit_attention(q, keys, values, mask, scale, softcap, extra)
        return out.reshape(count, heads, width, out.shape[-1])

    def _gather_blocks(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, L, dim] of whole block tables."""
        keys, values = self._layer_cache()
        count, each = self._table.shape
        found = []
        for store in (keys.transpose(2, 3), values):
            rows = store.index_select(0, self._table.view(-1)).view(
                count, each, store.shape[1], BLOCK, -1
            )
            found.append(rows.transpose(1, 2).reshape(count, store.shape[1], each * BLOCK, -1))
        return found[0], found[1]

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, groups · T, L] to be added to the scores."""
        name = (window, groups, dtype)
        mask = self._masks.get(name)
        if mask is None:
            places = torch.arange(self._table.shape[1] * BLOCK, device=self._table.device)[
                None, None
            ]
            hidden = places > self._real[:, :, None]
            if window is not None:
                hidden |= places <= self._real[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf
            )
            mask = mask.repeat(1, groups, 1)[:, None]
            self._masks[name] = mask
        return mask


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


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    view: View | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention function that transformers calls: q [B, H, T, d], k and v [B, H_kv, T,
    d] -> [B, T, H, d_v].
    """
    name = type(module).__name__
    if view is None:
        raise NotServed(f"{name} does not hand keyword arguments to its attention")
    odd = sorted(key for key, given in kwargs.items() if given is not None and key not in _INERT)
    if odd:
        raise NotServed(f"{name} uses {odd[0]} in its attention")
    if dropout:
        raise NotServed(f"{name} drops attention weights while sampling")
    if getattr(module, "is_causal", True) is False:
        raise NotServed(f"{name} is not causal")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if (
        sliding_window is None
        and kinds
        and kinds[getattr(module, "layer_idx", 0)] == "sliding_attention"
    ):
        raise NotServed(f"{name} slides, and does not tell its attention how far")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = view.attend(
        query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return out.transpose(1, 2).contiguous(), None


def make_change_error(model: nn.Module) -> ModelError:
    """Return the error of a model whose layers do not compute as they did when it was tried."""
    return ModelError(
        f"{type(model).__name__} was changed while it was in use: its layers do not compute as they did at first.",
        hint="Code of the task or a hook may have done that. Run the command again; to resume a training:"
        " agentrl train --resume last",
    )


@contextmanager
def attention_in(config: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Run the model of this transformers config with another attention, and restore the one that was set before.

    For a caller that has the model to itself: an update begins only when the policy's `rest` has returned, and one that
    samples meanwhile does so with a twin of the model, which has a config of its own.
    """
    # All of modeling_utils comes with it: seconds, which only a model of this process needs.
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
