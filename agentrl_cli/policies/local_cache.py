"""Keys and values of the rows being decoded, in one arena per layer.

Rows 0..n-1 of the arena are the live batch, so attention reads plain slices and copies nothing per step. An episode
that waits for a tool is parked: its keys and values are copied out (a megabyte or so for a small model) and its row is
free at once. A shared prompt is a parked copy that several rows start from.

The cache is handed to the model's own forward as `past_key_values`; every Hugging Face decoder that calls
`past_key_values.update(k, v, layer)` and accepts a four-dimensional attention mask works through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache


@dataclass(slots=True)
class Parked:
    """Keys and values of one sequence, outside the arena. `layers[i]` is a pair [kv_heads, length, head_dim]."""

    length: int
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    version: str
    """Of the weights that computed them."""


class Arena(Cache):
    """A row-indexed key and value store that grows in rows and positions as needed.

    `window(start, count, length)` says which rows the next forward works on and how far they reach; `positions`
    [count, T] says where the new keys go.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self.start = 0
        self.count = 0
        self.length = 0
        self.first = 0
        self.capacity = (0, 0)
        self.positions = torch.zeros(0, 0, dtype=torch.long)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions; what is stored is kept."""
        have_rows, have_length = self.capacity
        if rows <= have_rows and length <= have_length:
            return
        self.capacity = (max(rows, have_rows), max(length, have_length))
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                if old is not None:
                    store[layer] = self._grown(old)

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        rows, length = self.capacity
        new = old.new_zeros(rows, old.shape[1], length, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def window(self, start: int, count: int, length: int, positions: torch.Tensor, first: int) -> None:
        """What the next forward works on; `first` is positions[0, 0], known to the caller without asking the GPU."""
        self.start, self.count, self.length, self.positions, self.first = start, count, length, positions, first

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [count, heads, T, dim]; return all of the window [count, heads, length, dim]."""
        self._make(layer_idx, key_states, value_states)
        seen = []
        for store, new in zip((self.keys[layer_idx], self.values[layer_idx]), (key_states, value_states), strict=True):
            assert store is not None
            rows = store[self.start : self.start + self.count]
            if self.count == 1:
                rows[:, :, self.first : self.first + new.shape[2]] = new
            else:
                rows.scatter_(2, self.positions[:, None, :, None].expand_as(new), new)
            seen.append(rows[:, :, : self.length])
        return seen[0], seen[1]

    def _make(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """A layer's stores, when the first keys and values [..., heads, T, dim] show their shape, dtype and device."""
        if self.keys[layer] is None:
            rows, length = self.capacity
            self.keys[layer] = key.new_zeros(rows, key.shape[-3], length, key.shape[-1])
            self.values[layer] = value.new_zeros(rows, value.shape[-3], length, value.shape[-1])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def park(self, row: int, length: int, version: str) -> Parked:
        """A copy of the first `length` positions of a row."""
        layers = [
            (k[row, :, :length].clone(), v[row, :, :length].clone())
            for k, v in zip(self.keys, self.values, strict=True)
            if k is not None and v is not None
        ]
        return Parked(length, layers, version)

    def unpark(self, row: int, parked: Parked, length: int) -> None:
        """Copy the first `length` positions of parked keys and values into a row."""
        for layer, (key, value) in enumerate(parked.layers):
            self._make(layer, key, value)
            keys, values = self.keys[layer], self.values[layer]
            assert keys is not None and values is not None
            keys[row, :, :length] = key[:, :length]
            values[row, :, :length] = value[:, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row onto another, so that the live rows stay dense."""
        for store in (self.keys, self.values):
            for tensor in store:
                if tensor is not None:
                    tensor[target, :, :length] = tensor[source, :, :length]
