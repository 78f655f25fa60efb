"""The KV cache: blocks of positions, block tables, shared prefixes, and the caches of finished turns.

One pool holds the keys and values of every layer in blocks of BLOCK positions. A sequence's block table lists its
blocks in order. Sequences that begin alike share full blocks, which are counted; where they part within a block, the
later one gets a copy of it. A finished turn keeps its blocks for the next turn of its episode. Where memory is short,
prefixes are evicted first, then finished turns, the oldest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.errors import ModelError
from agentrl_cli.inference.request import TokenSequence
from agentrl_cli.types import Int32

BLOCK = 32
"""Positions of a block."""
MIN_SHARED = 16
"""A common prefix shorter than this is not kept."""
PREFIXES = 64
"""Prefixes that are kept while no sequence uses them."""
_FIRST = 32
"""Blocks of a new pool, at most."""


class NotServed(ModelError):
    """This architecture does something that the paged engine does not know."""


class BlockPool:
    """Blocks of keys and values, and how many users each has.

    A layer's keys are [blocks, heads, dim, BLOCK] and its values [blocks, heads, BLOCK, dim]: both products of
    attention then read a block as it lies in memory. Made when the first keys and values show heads, dim, dtype and
    device.

    Args:
        layers: Of the model.
        most: Blocks that there may be.
        scratch: Reserve block 0 beside them: padding of fixed shapes writes there.
    """

    def __init__(self, layers: int, most: int, *, scratch: bool = False) -> None:
        self.layers = layers
        self.most = most
        self.scratch = int(scratch)
        self.moves = 0
        """How often tensors were allocated; earlier addresses are invalid."""
        self.clear()

    def clear(self) -> None:
        """Give all memory back. No block may be in use."""
        self.size = self.scratch
        self.keys: list[Tensor | None] = [None] * self.layers
        self.values: list[Tensor | None] = [None] * self.layers
        self.users = [0] * self.size
        self._free: list[int] = []
        self.moves += 1

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self.size - self.scratch - len(self._free)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(
            t.numel() * t.element_size() for t in (*self.keys, *self.values) if t is not None
        )

    def allocate(self, count: int) -> list[int]:
        """Return the lowest free blocks, for one user each. The caller has made room."""
        if len(self._free) < count:
            self._grow(self.size + count - len(self._free))
        found = [heapq.heappop(self._free) for _ in range(count)]
        for block in found:
            self.users[block] = 1
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more user of each block."""
        for block in blocks:
            self.users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Count one user less of each block; a block without users is free."""
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                heapq.heappush(self._free, block)

    def copy(self, source: int, target: int) -> None:
        """Copy a block in all layers."""
        for store in (*self.keys, *self.values):
            if store is not None:
                store[target] = store[source]

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, allocated like the first ones [..., heads, T, dim]."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            keys = key.new_zeros(self.size, key.shape[-3], key.shape[-1], BLOCK)
            values = value.new_zeros(self.size, value.shape[-3], BLOCK, value.shape[-1])
            self.keys[layer], self.values[layer] = keys, values
            self.moves += 1
        return keys, values

    def _grow(self, least: int) -> None:
        before = self.size
        self.size = max(least, min(max(_FIRST, before * 3 // 2), self.most + self.scratch))
        self._free += range(before, self.size)  # all behind what is there: still a heap
        self.users += [0] * (self.size - before)
        self.moves += 1
        for stores in (self.keys, self.values):
            for layer, old in enumerate(
                stores
            ):  # one after the other: no more than one of them is there twice
                if old is not None:
                    new = old.new_empty(self.size, *old.shape[1:])
                    new[:before] = old
                    new[before:] = (
                        0  # what is not written yet is masked, and must be a number for that
                    )
                    stores[layer] = new
                    del old, new


@dataclass(slots=True, eq=False)
class Cached:
    """Token ids whose keys and values are cached, and their blocks."""

    ids: Int32
    blocks: list[int]
    slot: int = -1
    """Whose blocks they are, where slots are fixed."""


class KVCache:
    """Block tables of sequences, shared prefixes and finished turns within a number of blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.prefixes: list[Cached] = []
        """Prompts and prefixes that several sequences share; the latest used last."""
        self.turns: dict[str, Cached] = {}
        """Finished turns by episode; the oldest first."""
        self.peak = 0
        """Most blocks that were in use."""

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self.pool.used

    def longest(self, ids: Int32, key: str = "") -> tuple[int, Cached | None]:
        """Return how much of a context is cached, and where. Its last token always has to be computed."""
        start, source = 0, None
        for cached in (*self.prefixes, self.turns.get(key)):
            found = min(common(cached.ids, ids), len(ids) - 1) if cached is not None else 0
            if found and found >= start:
                start, source = found, cached
        return start, source

    def begin(self, request: TokenSequence) -> int | None:
        """Set the block table of a request's context. Returns how much of it is cached, None if memory is short."""
        begun = self._attach(request.context, request.key)
        if begun is None:
            return None
        request.block_table, start = begun
        return start

    def _attach(self, ids: Int32, key: str = "") -> tuple[list[int], int] | None:
        """Return a block table for a context and how much of it is cached; None if memory is short."""
        start, source = self.longest(ids, key)
        if source in self.prefixes:
            self.prefixes.append(self.prefixes.pop(self.prefixes.index(source)))
        table = [] if source is None else source.blocks[: blocks(start)]
        self.pool.share(table)
        self.forget(key)
        parted = bool(start % BLOCK) and self.pool.users[table[-1]] > 1
        if not self.make_room(blocks(len(ids)) - len(table) + parted):
            self.pool.release(table)
            return None
        if parted:
            shared = table.pop()
            table += self.pool.allocate(1)
            self.pool.copy(shared, table[-1])
            self.pool.release([shared])
        self._extend(table, len(ids))
        return table, start

    def reserve(self, request: TokenSequence) -> bool:
        """Return a block for each position of a running request. False if memory is short."""
        if not self.make_room(blocks(request.length) - len(request.block_table)):
            return False
        self._extend(request.block_table, request.length)
        return True

    def _extend(self, table: list[int], length: int) -> None:
        table += self.pool.allocate(blocks(length) - len(table))
        self.peak = max(self.peak, self.used)

    def add_prefix(self, ids: Int32) -> tuple[Cached, int] | None:
        """Return a new prefix and how much of it is cached already; None if it is short or cached,
        or memory is short.
        """
        if len(ids) < MIN_SHARED or any(
            common(cached.ids, ids) == len(ids) for cached in self.prefixes
        ):
            return None
        begun = self._attach(ids)
        if begun is None:
            return None
        prefix = Cached(ids, begun[0])
        self.prefixes.append(prefix)
        return prefix, begun[1]

    def keep(self, request: TokenSequence) -> None:
        """The turn is over: its blocks stay for the next turn of its episode."""
        held = request.context[:-1]
        self.pool.release(request.block_table[blocks(len(held)) :])
        self.forget(request.key)
        if len(held):
            self.turns[request.key] = Cached(held, request.block_table[: blocks(len(held))])
        request.block_table = []

    def free(self, request: TokenSequence) -> None:
        """Release a request's blocks."""
        self.pool.release(request.block_table)
        request.block_table = []

    def forget(self, key: str) -> None:
        """Release the blocks of an episode's last turn."""
        cached = self.turns.pop(key, None)
        if cached is not None:
            self.pool.release(cached.blocks)

    def make_room(self, need: int) -> bool:
        """Evict prefixes, then finished turns, until so many blocks are free. False if that is not enough."""
        while self.pool.most - self.used < need:
            if self.prefixes:
                self.pool.release(self.prefixes.pop(0).blocks)
            elif self.turns:
                self.forget(next(iter(self.turns)))
            else:
                return False
        return True

    def trim(self) -> None:
        """Evict the oldest prefixes beyond PREFIXES."""
        while len(self.prefixes) > PREFIXES:
            self.pool.release(self.prefixes.pop(0).blocks)

    def drop_cached(self) -> None:
        """New weights: evict the results of the old ones, except for running requests."""
        for cached in (*self.prefixes, *self.turns.values()):
            self.pool.release(cached.blocks)
        self.prefixes.clear()
        self.turns.clear()

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.prefixes.clear()
        self.turns.clear()
        self.pool.clear()


class FixedKVCache(KVCache):
    """Every slot has the same blocks for good, so that no shape and no address depends on what else is running.

    Args:
        slots: Rows of a decode step.
        length: Most positions of a sequence.
    """

    def __init__(self, pool: BlockPool, slots: int, length: int) -> None:
        super().__init__(pool)
        self._slots, self._each = slots, blocks(length)
        self._tables: list[list[int]] = []

    @property
    def tables(self) -> list[list[int]]:
        """The block table of each slot."""
        if not self._tables:
            self._tables = [self.pool.allocate(self._each) for _ in range(self._slots)]
            self.peak = self.used
        return self._tables

    def idle(self, live: Collection[str]) -> list[TokenSequence]:
        """The block table of each slot in a decode step.

        Its writes lie behind the positions that the slot's episode has cached.
        """
        rows = [
            TokenSequence(key="", ids=np.zeros(1, np.int32), block_table=table)
            for table in self.tables
        ]
        for key, cached in self.turns.items():
            if key not in live:
                rows[cached.slot].ids = np.zeros(len(cached.ids) + 1, np.int32)
        return rows

    def begin(self, request: TokenSequence) -> int | None:
        cached = self.turns.pop(request.key, None)
        request.block_table = self.tables[request.slot]
        return 0 if cached is None else min(common(cached.ids, request.context), request.length - 1)

    def keep(self, request: TokenSequence) -> None:
        self.turns[request.key] = Cached(request.context[:-1], request.block_table, request.slot)

    def free(self, request: TokenSequence) -> None:
        request.block_table = []

    def forget(self, key: str) -> None:
        self.turns.pop(key, None)

    def drop_cached(self) -> None:
        self.turns.clear()

    def clear(self) -> None:
        super().clear()
        self._tables = []


def blocks(length: int) -> int:
    """Blocks of a number of positions."""
    return -(-length // BLOCK)


def round_up(length: int) -> int:
    """Positions of whole blocks."""
    return blocks(length) * BLOCK


def common(a: Sequence[int] | Int32, b: Sequence[int] | Int32) -> int:
    """Return how many leading ids two sequences share."""
    n = min(len(a), len(b))
    differ = np.nonzero(np.asarray(a[:n]) != np.asarray(b[:n]))[0]
    return int(differ[0]) if len(differ) else n


def block_tensor(table: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[rows, n] block tables, padded with block 0."""
    longest = max(map(len, table))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in table], device=device)
