"""Keys and values of the rows being decoded, on shelves of rows of one length; and those set aside.

A shelf is one tensor of keys and one of values per layer, [rows, heads, length, dim]; its live rows are the first ones,
so attention reads plain slices and copies nothing per step. A row that outgrows its shelf moves to one half as long
again: memory follows the tokens that are alive, not the longest row times the batch. What is counted and bounded is
positions, in blocks of BLOCK.

An episode that waits for a tool is parked: its keys and values are copied out and its row is free at once. Where the
engine takes rows from anywhere (`Engine.packs`), every row has a shelf of its own: then the shelf itself is parked, and
nothing is copied or held twice. What several rows begin with is kept once, apart from them (local_bases.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from agentrl_cli.policies.local_bases import Base
    from agentrl_cli.policies.local_request import Request

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer keys and values [kv_heads, length, head_dim]."""
BLOCK = 32
"""Lengths are rounded up to this many positions: memory is counted in blocks, and kernels see few shapes."""
SHORTEST = 64
"""Positions of the shortest shelf."""


@dataclass(slots=True, eq=False)
class Parked:
    """Keys and values of one sequence after its shared beginning, off the shelves."""

    length: int
    """Positions in `layers`."""
    layers: Layers
    version: str
    """Of the weights that computed them."""
    base: Base | None = None
    shelf: Shelf | None = None
    """Where `layers` lie, where that shelf was parked with them."""

    @property
    def blocks(self) -> int:
        return blocks(self.length) if self.shelf is None else self.shelf.blocks


@dataclass(frozen=True, slots=True)
class Incoming:
    """A parked row that moves onto a shelf, layer by layer: each is given up where it was when it has arrived."""

    row: int
    length: int
    """Positions that are copied."""
    layers: Layers

    def move(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy one layer, and drop it."""
        for store, own in zip((keys, values), self.layers[layer], strict=True):
            store[self.row, :, : self.length] = own[:, : self.length]
        self.layers[layer] = (keys.new_empty(0), values.new_empty(0))


@dataclass(slots=True, eq=False)
class Shelf:
    """Rows of `length` positions; `live` says whose the first ones are (None: a lane that nobody has)."""

    length: int
    layers: int
    live: list[Request | None] = field(default_factory=list)
    rows: int = 0
    """Rows that there is memory for."""
    keys: list[torch.Tensor | None] = field(default_factory=list)
    values: list[torch.Tensor | None] = field(default_factory=list)
    _pointers: np.ndarray[Any, np.dtype[np.uint64]] | None = None

    def __post_init__(self) -> None:
        self.keys = [None] * self.layers
        self.values = [None] * self.layers

    @property
    def blocks(self) -> int:
        """Blocks that there is memory for."""
        return self.rows * (self.length // BLOCK)

    def resize(self, rows: int, incoming: Sequence[Incoming] = ()) -> None:
        """Have memory for just so many rows; what the first ones hold is kept. One layer after the other.

        `incoming`: parked rows that move in. So at no time is more of them there twice than a layer.
        """
        changed, self.rows = rows != self.rows, rows
        self._pointers = None
        for layer in range(self.layers) if changed or incoming else ():
            for number, store in enumerate((self.keys, self.values)):
                old = store[layer]
                if old is None and incoming:
                    like = incoming[0].layers[layer][number]
                    store[layer] = like.new_zeros(rows, like.shape[0], self.length, like.shape[-1])
                elif old is not None and changed:
                    new = old.new_empty(rows, *old.shape[1:])
                    kept = min(rows, old.shape[0])
                    new[:kept] = old[:kept]
                    new[kept:] = 0  # what is not written yet is masked, and must be a number for that
                    store[layer] = new
                    del new
                del old
            keys, values = self.keys[layer], self.values[layer]
            for one in incoming:
                assert keys is not None and values is not None
                one.move(layer, keys, values)
            del keys, values

    def lengthen(self, length: int) -> None:
        """Have longer rows, with what they hold. One layer after the other."""
        self.length = length
        self._pointers = None
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                if old is not None:
                    rows, heads, before, dim = old.shape
                    new = old.new_zeros(rows, heads, length, dim)
                    new[:, :, :before] = old
                    store[layer] = new
                    del old

    def stores(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, made when the first ones [..., heads, T, dim] show shape, dtype and device."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            keys = key.new_zeros(self.rows, key.shape[-3], self.length, key.shape[-1])
            values = value.new_zeros(self.rows, value.shape[-3], self.length, value.shape[-1])
            self.keys[layer], self.values[layer] = keys, values
            self._pointers = None
        return keys, values

    def pointers(self, example: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """[layers, 2] where keys and values begin in memory; made like `example` [..., heads, T, dim] if need be."""
        if self._pointers is None:
            stored = [self.stores(layer, example, example) for layer in range(self.layers)]
            self._pointers = np.array([[k.data_ptr(), v.data_ptr()] for k, v in stored], np.uint64)
        return self._pointers

    def view(self, row: int) -> Layers:
        """The keys and values of a row where they are."""
        pairs = zip(self.keys, self.values, strict=True)
        return [(k[row], v[row]) for k, v in pairs if k is not None and v is not None]

    def kept(self) -> Layers:
        """What a shelf of one row that is parked whole tells of its keys and values."""
        return self.view(0)

    def park(self, row: int, length: int, version: str, base: Base | None) -> Parked:
        """A copy of the first `length` positions of a row."""
        layers = [(k[:, :length].clone(), v[:, :length].clone()) for k, v in self.view(row)]
        return Parked(length, layers, version, base)

    def fill(self, rows: Sequence[int], layers: Layers, length: int) -> None:
        """Copy the first `length` positions of keys and values into consecutive rows."""
        first, end = rows[0], rows[-1] + 1
        for layer, (key, value) in enumerate(layers):
            keys, values = self.stores(layer, key, value)
            keys[first:end, :, :length] = key[:, :length]
            values[first:end, :, :length] = value[:, :length]

    def take(self, target: int, source: Shelf, row: int, length: int) -> None:
        """Copy a row of a shelf (this one or another) into the row `target` of this one."""
        for layer, (key, value) in enumerate(zip(source.keys, source.values, strict=True)):
            if key is not None and value is not None:
                keys, values = self.stores(layer, key, value)
                keys[target, :, :length] = key[row, :, :length]
                values[target, :, :length] = value[row, :, :length]


def blocks(length: int) -> int:
    """Blocks of a number of positions."""
    return -(-length // BLOCK)


def rounded(length: int) -> int:
    """Positions of whole blocks."""
    return blocks(length) * BLOCK


def shelf_length(length: int, fine: bool = False) -> int:
    """Positions of the shelf for a row of `length`: 64, 96, 160, 256, 384, 576 …, each about half as long again.

    `fine`: 64, 96, 128, 160, 224, 288, 384 …, each about a quarter longer: shelves of one row need not be alike.
    """
    size = SHORTEST
    while size < length:
        size = rounded(size * 5 // 4 if fine else size * 3 // 2)
    return size
