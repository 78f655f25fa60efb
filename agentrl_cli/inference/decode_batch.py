"""The block tables of a decode step as arrays of fixed shapes.

Attention of a decode step multiplies block by block, not sequence by sequence: a block of one sequence meets that
sequence's query; a block that several sequences share meets the queries of all of them at once, so its keys and values
are read once (attention.py). The arrays here are the block tables of the step seen from both sides: which query meets
which block, and where the parts of each sequence lie. They change when a sequence comes, leaves or gets another block;
most steps use those of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.inference.kv_cache import BLOCK
from agentrl_cli.inference.request import TokenSequence

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
MEMBERS = 8
"""Most queries that meet a shared block at once; a block with more of them is listed several times."""
IN_PLACE = 0.7
"""Blocks are read where they are if at least so much of what lies between them is attended to, else gathered."""
NOWHERE = -1
"""In `parts`: the sequence has no further part."""


class Shape(NamedTuple):
    """Sizes of the arrays of a decode step."""

    rows: int
    blocks: int
    """Blocks that meet one query each."""
    shared: int
    """Entries of shared blocks."""
    members: int
    """Queries of such an entry."""
    parts: int
    """Most blocks of a sequence."""

    @property
    def parts_in_all(self) -> int:
        """Blocks as the queries meet them: a shared one counts once for each of its members."""
        return self.blocks + self.shared * self.members

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Of the arrays of a DecodeBatch in one: the step's, then the layout's."""
        return (
            (3, self.rows),
            (self.blocks,),
            (self.shared,),
            (self.parts_in_all,),
            (self.rows, self.parts),
        )


@dataclass(slots=True, eq=False)
class Layout:
    """The block tables of a step. A part is a block as one sequence sees it."""

    blocks: Ints
    """[blocks] blocks that meet one query."""
    shared: Ints
    """[shared] blocks that meet several queries."""
    spots: Ints
    """[blocks + shared · members] where each part stands in `parts`: row · its width + column; 0 if it is padding."""
    parts: Ints
    """[rows, parts] per row its parts: n for `blocks[n]`, blocks + e · members + m for `shared[e]`, NOWHERE."""
    members: int
    """Queries of an entry of `shared`."""
    in_place: bool
    """`blocks` are the first ones of the pool in order: they are read where they are."""
    tables: Sequence[list[int]] = ()
    """The block tables that these arrays are of; `counts` says how many blocks each had."""
    counts: Sequence[int] = ()

    @property
    def shape(self) -> Shape:
        rows, parts = self.parts.shape
        return Shape(rows, len(self.blocks), len(self.shared), self.members, parts)

    @property
    def arrays(self) -> tuple[Ints, ...]:
        return self.blocks, self.shared, self.spots, self.parts

    def describes(self, tables: Sequence[list[int]]) -> bool:
        """Whether these are still the block tables: a table of a running sequence changes by growing alone."""
        same = len(tables) == len(self.tables) and all(map(is_, tables, self.tables))
        return same and list(map(len, tables)) == self.counts


@dataclass(slots=True)
class DecodeBatch:
    """Arrays of a decode step. Rows are sequences."""

    step: Ints
    """[3, rows] tokens fed by the step; their positions; where their keys and values go, block · BLOCK + offset. With
    drafts a sequence has several rows, one behind the other."""
    layout: Layout
    width: int = 1
    """Most rows of a sequence."""
    places: Ints | None = None
    """[rows] of each row its sequence · width + how far it is behind the first; None for one row each."""

    def pack(self) -> Ints:
        """Return all arrays in one."""
        return np.concatenate([array.reshape(-1) for array in (self.step, *self.layout.arrays)])


def unpack(packed: Tensor, shape: Shape) -> list[Tensor]:
    """Return the arrays of a DecodeBatch in one tensor, as views of it."""
    sizes = shape.sizes
    flat = torch.split(packed, [int(np.prod(size)) for size in sizes])
    return [part.view(size) for part, size in zip(flat, sizes, strict=True)]


def decode_batch(
    sequences: Sequence[TokenSequence],
    before: Layout | None = None,
    drafts: Sequence[Sequence[int]] = (),
) -> DecodeBatch:
    """Return the arrays of a step that feeds each sequence its newest token and the draft behind it.

    The layout is that of `before` if it still holds.
    """
    tables = [sequence.block_table for sequence in sequences]
    layout = before if before is not None and before.describes(tables) else layout_of(tables)
    behind = drafts or [()] * len(sequences)
    tokens, positions, write, places = [], [], [], []
    width = 1 + max(map(len, behind))
    for row, (sequence, table, draft) in enumerate(zip(sequences, tables, behind, strict=True)):
        first = sequence.length - 1
        tokens += [sequence.last, *draft]
        for n in range(first, first + 1 + len(draft)):
            positions.append(n)
            write.append(table[n // BLOCK] * BLOCK + n % BLOCK)
            places.append(row * width + n - first)
    step = np.array([tokens, positions, write], np.int64)
    return DecodeBatch(step, layout, width, np.array(places, np.int64) if width > 1 else None)


def layout_of(tables: Sequence[list[int]]) -> Layout:
    """Return the arrays of some block tables."""
    lengths = list(map(len, tables))
    counts = np.array(lengths)
    flat = np.array([block for table in tables for block in table], np.int64)
    row = np.repeat(np.arange(len(tables)), counts)
    parts = np.full((len(tables), int(counts.max())), NOWHERE, np.int64)
    spot = row * parts.shape[1] + np.arange(len(flat)) - (counts.cumsum() - counts)[row]

    is_shared = np.bincount(flat)[flat] > 1
    blocks = flat[~is_shared]
    size = int(blocks.max(initial=-1)) + 1
    in_place = len(blocks) >= IN_PLACE * size
    part, blocks = (blocks, np.arange(size)) if in_place else (np.arange(len(blocks)), blocks)
    shared, members, shared_part = _list_shared(flat[is_shared])
    parts.flat[spot[~is_shared]] = part
    parts.flat[spot[is_shared]] = len(blocks) + shared_part
    spots = np.zeros(len(blocks) + len(shared) * members, np.int64)
    spots[part] = spot[~is_shared]
    spots[len(blocks) + shared_part] = spot[is_shared]
    return Layout(blocks, shared, spots, parts, members, in_place, list(tables), lengths)


def _list_shared(blocks: Ints) -> tuple[Ints, int, Ints]:
    """Entries of shared blocks, their members, and which part (entry · members + member) each given block is."""
    if not len(blocks):
        return np.zeros(0, np.int64), 1, np.zeros(0, np.int64)
    order = np.argsort(blocks, kind="stable")
    _, first, counts = np.unique(blocks[order], return_index=True, return_counts=True)
    members = min(MEMBERS, int(counts.max()))
    rank = np.arange(len(blocks)) - np.repeat(first, counts)
    entries = -(-counts // members)
    part = np.empty(len(blocks), np.int64)
    part[order] = (
        np.repeat(entries.cumsum() - entries, counts) + rank // members
    ) * members + rank % members
    return np.repeat(blocks[order[first]], entries), members, part


def pad_batch(batch: DecodeBatch, size: int) -> DecodeBatch:
    """Return a step of few different shapes: all `size` blocks of the pool in place, the rest padded to powers of two.

    Block 0 must be scratch: rows that fill up write there.
    """
    layout, shape = batch.layout, batch.layout.shape
    rows, width, shared = (
        _power(shape.rows),
        _power(shape.parts),
        _power(shape.shared) if shape.shared else 0,
    )
    members = MEMBERS if shared else 1
    row, column = np.nonzero(layout.parts >= 0)
    old = layout.parts[row, column]
    entry = old - shape.blocks
    several = size + entry // shape.members * members + entry % shape.members
    part = np.where(entry < 0, np.append(layout.blocks, 0)[np.minimum(old, shape.blocks)], several)
    parts = np.full((rows, width), NOWHERE, np.int64)
    parts[row, column] = part
    spots = np.zeros(size + shared * members, np.int64)
    spots[part] = row * width + column
    step, blocks = np.zeros((3, rows), np.int64), np.zeros(shared, np.int64)
    step[:, : shape.rows], blocks[: shape.shared] = batch.step, layout.shared
    return DecodeBatch(step, Layout(np.arange(size), blocks, spots, parts, members, in_place=True))


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
