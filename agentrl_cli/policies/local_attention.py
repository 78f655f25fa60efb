"""Attention of a batch of rows over their shelves, and the cache through which a model's own forward reaches it.

`Rows` is what one forward works on: it is handed to a transformers model as `past_key_values`, stores the new keys and
values, and gives the attention over all of a row's positions. What rows begin with in common is attended to in one
product for all of them (local_sharing.py), and joined to the rest by the two log-sums. `rows_attention` is the function
that transformers calls in place of its own (registered as NAME): it honours causality, sliding windows, soft caps and
sinks, and raises NotServed on anything else, so that no model is run wrongly.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from agentrl_cli.errors import ModelError
from agentrl_cli.policies.local_cache import Shelf, rounded
from agentrl_cli.policies.local_sharing import Sharing, attention_and_sum

NAME = "agentrl_rows"
"""Under this name the function stands in transformers' AttentionInterface."""
ATTENTION_LOCK = threading.RLock()
"""Held while a model's attention implementation is exchanged: sampling and training may run in two threads."""

_INERT = {
    "cache_position", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "logits_to_keep", "is_causal", "position_embeddings", "num_items_in_batch", "output_router_logits",
    "num_logits_to_keep", "labels", "inputs_embeds", "attn_implementation",
}  # fmt: skip
"""What models hand to their attention functions that does not change the attention of a causal row."""


class NotServed(ModelError):
    """This architecture does something that the batched engines do not know."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of one shelf: batch rows [offset, offset + count)."""

    shelf: Shelf
    first: int
    count: int
    offset: int
    length: int
    """Positions that are attended to."""


class Seen(Cache):
    """What one forward works on: it stores new keys and values, and attends to all of a row's.

    Attributes:
        positions: [B, T] of the new tokens.
        calls: How many layers attended so far.
    """

    positions: Tensor
    calls: int

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

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

        Returns [B, H, T, d_v]. `window`: a position sees so many, itself included. `softcap`: scores s become
        c·tanh(s / c). `sinks` [H]: a logit per head that takes part in the softmax and has no value.
        """
        raise NotImplementedError


class Rows(Seen):
    """The rows of one forward: B rows over some shelves, T new tokens each.

    Args:
        parts: Where they are; together they cover the batch.
        starts: [B] position of each row's first new token.
        width: T.
        device: Of the model.
        sharing: The beginnings that rows share; their shelves hold what comes after.
    """

    def __init__(
        self,
        parts: list[Part],
        starts: list[int],
        width: int,
        device: torch.device,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.parts = parts
        self.width = width
        self.fresh = width > 1 and not any(starts)
        """Nothing is stored yet: the new tokens attend to each other alone."""
        begins = torch.tensor(starts, device=device)
        self.positions = begins[:, None] + torch.arange(width, device=device)[None]
        """[B, T]"""
        self.calls = 0
        self.reach = sys.maxsize
        """Positions that every layer saw back, at least: 0 where a layer's attention was more than a softmax."""
        self._layer = 0
        self._sharing = sharing
        self._places = self.positions
        if sharing is not None:
            starts = [start - own for start, own in zip(starts, sharing.lengths, strict=True)]
            self._places = self.positions - sharing.held
        self._where = [self._indices(part, starts) for part in parts]
        self._masks: dict[tuple[int, int | None, int, torch.dtype], Tensor] = {}

    def _indices(self, part: Part, starts: list[int]) -> tuple[Tensor, Tensor] | slice:
        """Where new keys go: a plain slice of positions, or (rows, positions) as index tensors."""
        own = starts[part.offset : part.offset + part.count]
        if min(own) == max(own) and own[0] + self.width <= part.shelf.length:
            return slice(own[0], own[0] + self.width)
        rows = torch.arange(part.first, part.first + part.count, device=self.positions.device)
        places = self._places[part.offset : part.offset + part.count]
        # Padding may reach beyond the shelf: its last position is written by padding alone until a token comes there.
        places = places.clamp(max=part.shelf.length - 1)
        return (rows, places[:, 0]) if self.width == 1 else (rows[:, None], places)

    # --- transformers' cache -----------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, heads, T, dim]. They come back as they are: attention reads the shelves."""
        self._layer = layer_idx
        for part, where in zip(self.parts, self._where, strict=True):
            stores = part.shelf.stores(layer_idx, key_states, value_states)
            for store, new in zip(stores, (key_states, value_states), strict=True):
                rows = new[part.offset : part.offset + part.count]
                if isinstance(where, slice):
                    store[part.first : part.first + part.count, :, where] = rows
                elif self.width == 1:
                    store[where[0], :, where[1]] = rows[:, :, 0]
                else:
                    store[where[0], :, where[1]] = rows.transpose(1, 2)
        return key_states, value_states

    # --- attention ---------------------------------------------------------------------------------------------------

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
        plain = softcap is None and sinks is None
        self.reach = min(self.reach, sys.maxsize if window is None else window) if plain else 0
        if self._sharing is not None:
            if not plain:
                raise NotServed("rows with such attention share no beginnings")
            return self._joined(query, scale, self._sharing)
        if plain and self.fresh and (window is None or window >= self.width):
            grouped = query.shape[1] != key.shape[1]
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        outs = [self._part(number, query, scale, window, softcap, sinks) for number in range(len(self.parts))]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _joined(self, query: Tensor, scale: float, sharing: Sharing) -> Tensor:
        """Attention over what rows share and over what is their own, weighed by the log-sum of each."""
        own = [self._own(number, query, scale) for number in range(len(self.parts))]
        rest, rest_sum = own[0] if len(own) == 1 else (torch.cat(both) for both in zip(*own, strict=True))
        first, first_sum = sharing.attend(query, self._layer, scale)
        weight = torch.sigmoid_(first_sum.sub_(rest_sum)).to(rest.dtype)
        return torch.lerp(rest, first, weight[..., None])

    def _own(self, number: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Over the row's own positions: [n, H, T, d] and the log-sum of the scores [n, H, T]."""
        part, keys, values = self._stored(number)
        q = query[part.offset : part.offset + part.count]
        count, heads, width, dim = q.shape
        groups = heads // keys.shape[1]
        mask = self._mask(number, None, groups, q.dtype)
        out, total = attention_and_sum(q.reshape(count, keys.shape[1], groups * width, dim), keys, values, mask, scale)
        return out.reshape(count, heads, width, dim), total.reshape(count, heads, width)

    def _stored(self, number: int) -> tuple[Part, Tensor, Tensor]:
        """A part, and the keys and values of its rows in the layer updated last."""
        part = self.parts[number]
        rows = slice(part.first, part.first + part.count)
        keys, values = part.shelf.keys[self._layer], part.shelf.values[self._layer]
        assert keys is not None and values is not None
        return part, keys[rows, :, : part.length], values[rows, :, : part.length]

    def _part(
        self, number: int, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        part, keys, values = self._stored(number)
        q = query[part.offset : part.offset + part.count]
        count, heads, width, dim = q.shape
        groups = heads // keys.shape[1]
        # The queries of all heads that share keys count as more positions of one head: keys are read once.
        q = q.reshape(count, keys.shape[1], groups * width, dim)
        mask = self._mask(number, window if window is not None and window < part.length else None, groups, q.dtype)
        if softcap is None and sinks is None:
            out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        else:
            extra = None if sinks is None else sinks.view(1, -1, groups, 1).expand(-1, -1, -1, width)
            out = explicit_attention(q, keys, values, mask, scale, softcap, extra)
        return out.reshape(count, heads, width, out.shape[-1])

    def _mask(self, number: int, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[rows, 1, groups · T, length] to be added to the scores; [rows, 1, 1, length] where T is one."""
        name = (number, window, groups if self.width > 1 else 1, dtype)
        mask = self._masks.get(name)
        if mask is None:
            part = self.parts[number]
            places = self._places[part.offset : part.offset + part.count, :, None]
            keys = torch.arange(part.length, device=places.device)[None, None]
            hidden = keys > places
            if window is not None:
                # Padding beyond the last position sees what that one sees: of nothing it would be no number, and what
                # is no number and masked is none in a sum.
                hidden |= keys <= places.clamp(max=part.length - 1) - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=places.device).masked_fill_(hidden, -torch.inf)
            mask = (mask if self.width == 1 else mask.repeat(1, groups, 1))[:, None]
            self._masks[name] = mask
        return mask


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


def rows_attention(
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
    rows: Seen | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: q [B, H, T, d], k and v [B, H_kv, T, d] -> [B, T, H, d_v]."""
    name = type(module).__name__
    if rows is None:
        raise NotServed(f"{name} does not hand keyword arguments to its attention")
    odd = sorted(key for key, given in kwargs.items() if given is not None and key not in _INERT)
    if odd:
        raise NotServed(f"{name} uses {odd[0]} in its attention")
    if dropout:
        raise NotServed(f"{name} drops attention weights while sampling")
    if getattr(module, "is_causal", True) is False:
        raise NotServed(f"{name} is not causal")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if sliding_window is None and kinds and kinds[getattr(module, "layer_idx", 0)] == "sliding_attention":
        raise NotServed(f"{name} slides, and does not tell its attention how far")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = rows.attend(query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def rows_in(config: Any) -> Iterator[None]:
    """Run the model of this transformers config with our attention, and put back what was set before."""
    from transformers import AttentionInterface

    with ATTENTION_LOCK:
        AttentionInterface.register(NAME, rows_attention)
        before = config._attn_implementation
        config._attn_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation = before


def one_part(shelf: Shelf, first: int, count: int, length: int) -> list[Part]:
    """The parts of a batch that is consecutive rows of one shelf, attending to `length` positions, rounded up."""
    return [Part(shelf, first, count, 0, min(rounded(length), shelf.length))]
