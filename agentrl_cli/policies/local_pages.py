"""Keys and values in pages that stay where they are: what a decode step of fixed shapes reads and writes.

The pool has one tensor of keys and one of values per layer, [pages, BLOCK, heads, dim]; a row is a list of pages, and
grows by one more of them. So nothing moves while rows come, grow and go, and where a row's keys are is a number in a
tensor, not an address: a recorded step (local_graphs.py) can be played again for other rows. A beginning that rows
share is pages, too: a row's table names those of its beginning first, then its own.

Page 0 belongs to nobody: what fills a batch up writes there.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl_cli.policies.local_attention import Seen, explicit_attention
from agentrl_cli.policies.local_bases import Base
from agentrl_cli.policies.local_cache import BLOCK, Incoming, Layers, Shelf, blocks

FIRST = 64
"""Pages that a pool begins with; it doubles where they are too few."""
NOWHERE = 2**40
"""The position of a place that holds nothing: behind every other."""
_STAMPS = itertools.count()


class Pool:
    """Pages for all rows. Made when the first keys and values show heads, dim, dtype and device.

    Args:
        layers: Of the model.
        most: Pages beside page 0 that there is memory for.
    """

    def __init__(self, layers: int, most: int) -> None:
        self.layers = layers
        self.most = most
        self.moves = 0
        """How often the tensors were made anew: what knew their addresses does not any more."""
        self.clear()

    def clear(self) -> None:
        """Give the memory back. Nobody may hold pages any more."""
        self.pages = 1
        self.keys: list[Tensor | None] = [None] * self.layers
        self.values: list[Tensor | None] = [None] * self.layers
        self.free: deque[int] = deque()  # another one: pages that come back late are no pages of these tensors
        self.moves += 1

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values) if t is not None)

    def take(self, count: int) -> list[int]:
        """Free pages. Who may have how many is counted in blocks elsewhere (local_rows.py)."""
        if len(self.free) < count:
            self._grow(self.pages + count - len(self.free))
        return [self.free.popleft() for _ in range(count)]

    def stores(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, made like the first ones [..., heads, T, dim]."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            keys = key.new_zeros(self.pages, BLOCK, key.shape[-3], key.shape[-1])
            values = value.new_zeros(self.pages, BLOCK, value.shape[-3], value.shape[-1])
            self.keys[layer], self.values[layer] = keys, values
            self.moves += 1
        return keys, values

    def _grow(self, least: int) -> None:
        before = self.pages
        self.pages = max(least, min(max(FIRST, 2 * before), self.most + 1))
        self.free.extend(range(before, self.pages))
        self.moves += 1
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):  # one after the other: no more than one of them is there twice
                if old is not None:
                    new = old.new_zeros(self.pages, *old.shape[1:])
                    new[:before] = old
                    store[layer] = new
                    del old, new


class PagedShelf(Shelf):
    """A shelf whose rows are pages of a pool, given back when nobody holds the shelf any more."""

    def __init__(self, pool: Pool, length: int, layers: int) -> None:
        super().__init__(length, layers)
        self.pool = pool
        self.pages: list[list[int]] = []
        """Of each row, in order."""
        self.stamp = next(_STAMPS)
        """Another number whenever `pages` change."""
        weakref.finalize(self, _give_back, pool.free, self.pages).atexit = False

    def resize(self, rows: int, incoming: Sequence[Incoming] = ()) -> None:
        assert not incoming, "rows of pages are handed on, not copied"
        if rows == self.rows:
            return
        while len(self.pages) > rows:
            self.pool.free.extend(self.pages.pop())
        while len(self.pages) < rows:
            self.pages.append(self.pool.take(self.length // BLOCK))
        self.rows, self.stamp = rows, next(_STAMPS)

    def lengthen(self, length: int) -> None:
        for pages in self.pages:
            pages += self.pool.take((length - self.length) // BLOCK)
        self.length, self.stamp = length, next(_STAMPS)

    def kept(self) -> Layers:
        return []  # the pages stay with the shelf

    def view(self, row: int) -> Layers:
        """A copy of a row: what another begins with."""
        pairs = zip(self.pool.keys, self.pool.values, strict=True)
        return [(self._read(k, row), self._read(v, row)) for k, v in pairs if k is not None and v is not None]

    def fill(self, rows: Sequence[int], layers: Layers, length: int) -> None:
        for layer, pair in enumerate(layers):
            for store, given in zip(self.pool.stores(layer, *pair), pair, strict=True):
                for row in rows:
                    for number, page in enumerate(self.pages[row]):
                        piece = given[:, number * BLOCK : min((number + 1) * BLOCK, length)].transpose(0, 1)
                        store[page, : len(piece)] = piece

    def _read(self, store: Tensor, row: int) -> Tensor:
        return store[self.pages[row]].flatten(0, 1).transpose(0, 1)


def paged(
    pool: Pool,
    places: Sequence[tuple[Shelf, int]],
    starts: Sequence[int],
    counts: Sequence[int],
    bases: Sequence[Base | None],
    device: torch.device,
) -> Paged:
    """What a forward of `counts` new tokens a row works on, for rows anywhere in a pool, in shapes of its own."""
    held = [0 if base is None else base.length for base in bases] or [0] * len(starts)
    lines: list[list[int]] = []
    for n, (shelf, row) in enumerate(places):
        assert isinstance(shelf, PagedShelf)
        base = bases[n] if bases else None
        lines.append(line(base) + shelf.pages[row][: blocks(starts[n] + counts[n] - held[n])])
    longest = max(map(len, lines))
    table = torch.tensor([pages + [0] * (longest - len(pages)) for pages in lines], device=device)
    columns = (torch.tensor(column, device=device)[:, None] for column in (starts, held, counts))
    begins, shared, given = columns
    return Paged(pool, table, begins, shared, max(counts), given, fresh=not any(starts))


def line(base: Base | None) -> list[int]:
    """The pages of a beginning."""
    if base is None:
        return []
    assert isinstance(base.shelf, PagedShelf)
    return base.shelf.pages[base.row][: blocks(base.length)]


def _give_back(free: deque[int], pages: list[list[int]]) -> None:
    for row in pages:
        free.extend(row)


class Paged(Seen):
    """The rows of one forward over pages. Every number that differs between steps is in a tensor.

    Args:
        pool: Where keys and values are.
        table: [B, n] pages of each row, those of its beginning first; 0 behind the last.
        starts: [B, 1] position of each row's first new token.
        held: [B, 1] positions of the beginning that it shares; its own pages come after that one's last.
        width: T, new tokens of a row.
        counts: [B, 1] how many of them are there, where the others fill up; None: all.
        fresh: No row has anything stored: the new tokens attend to each other alone.
    """

    def __init__(
        self,
        pool: Pool,
        table: Tensor,
        starts: Tensor,
        held: Tensor,
        width: int = 1,
        counts: Tensor | None = None,
        fresh: bool = False,
    ) -> None:
        super().__init__(layers=[])
        self.calls = 0
        self._pool, self._table, self._layer, self._width = pool, table.reshape(-1), 0, width
        steps = torch.arange(width, device=table.device)[None]
        self.positions = starts + steps
        ends = (held + BLOCK - 1) // BLOCK * BLOCK  # where the pages of the beginning end
        places = self.positions - held + ends
        page = table.gather(1, (places // BLOCK).clamp(max=table.shape[1] - 1))
        slots = page * BLOCK + places % BLOCK
        self._slots = (slots if counts is None else slots.masked_fill(steps >= counts, 0)).reshape(-1)
        seats = torch.arange(table.shape[1] * BLOCK, device=table.device)[None]
        own = torch.where(seats < held, seats, seats - ends + held)
        self._seen = own.masked_fill((seats >= held) & (seats < ends), NOWHERE)
        """[B, n · BLOCK] the position that each place holds."""
        # What fills up sees what the last token sees: one that saw nothing would be no number, and so would page 0.
        last = None if counts is None else (starts + counts - 1).clamp(min=0)
        self._from = self.positions if last is None else torch.minimum(self.positions, last)
        """[B, T] the position that each token attends from."""
        self._fresh = fresh
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, heads, T, dim]. They come back as they are: attention reads the pages."""
        self._layer = layer_idx
        stores = self._pool.stores(layer_idx, key_states, value_states)
        for store, new in zip(stores, (key_states, value_states), strict=True):
            store.flatten(0, 1).index_copy_(0, self._slots, new.transpose(1, 2).flatten(0, 1))
        return key_states, value_states

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
        if plain and self._fresh and (window is None or window >= width):
            grouped = heads != key.shape[1]
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        keys, values = (self._rows(store, count) for store in (self._pool.keys, self._pool.values))
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

    def _rows(self, stores: list[Tensor | None], count: int) -> Tensor:
        """[B, heads, n · BLOCK, dim] of the layer updated last, every row's pages in a line."""
        store = stores[self._layer]
        assert store is not None
        pages = store.index_select(0, self._table)
        return pages.view(count, -1, *store.shape[2:]).transpose(1, 2)

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, groups · T, places] to be added to the scores; [B, 1, 1, places] where T is one."""
        name = (window, groups, dtype)
        mask = self._masks.get(name)
        if mask is None:
            seen, places = self._seen[:, None], self._from[:, :, None]
            hidden = seen > places
            if window is not None:
                hidden |= seen <= places - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            mask = (mask if self._width == 1 else mask.repeat(1, groups, 1))[:, None]
            self._masks[name] = mask
        return mask
