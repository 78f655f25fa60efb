"""The block tables of a decode step as arrays of fixed shapes.

Attention of a decode step goes over blocks, not over sequences: a block of one sequence meets that sequence's query; a
block that several sequences share meets the queries of all of them at once, so its keys and values are read once. What
each block gives is then merged per sequence (attention.py). The arrays here say which query meets which block, and
where the parts of each sequence lie. They travel to the device as one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
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
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Of the arrays of a DecodeBatch, in order."""
        rows, many, shared, members, parts = self
        each, own = ((rows,), (rows,), (rows,)), ((many,), (many,), (many,), (many,))
        return *each, *own, (shared,), (shared,), (shared, members), (rows, parts)


@dataclass(slots=True)
class DecodeBatch:
    """Arrays of a decode step. Rows are sequences; a part is a block as one sequence sees it."""

    tokens: Ints
    """[rows] fed by the step."""
    positions: Ints
    """[rows] of those tokens."""
    write: Ints
    """[rows] where their keys and values go: block · BLOCK + offset."""
    blocks: Ints
    """[blocks] blocks that meet one query."""
    owner: Ints
    """[blocks] the row whose query that is."""
    begins: Ints
    """[blocks] position of the block's first place in its sequence."""
    held: Ints
    """[blocks] how many of its places are written."""
    shared: Ints
    """[shared] blocks that meet several queries."""
    shared_begins: Ints
    """[shared] position of the block's first place in its sequences."""
    members: Ints
    """[shared, members] the rows of those queries."""
    parts: Ints
    """[rows, parts] per row its parts: n for `blocks[n]`, blocks + e · members + m for `shared[e]`, NOWHERE."""
    in_place: bool = False
    """`blocks` are the first ones of the pool in order: they are read where they are."""

    @property
    def shape(self) -> Shape:
        shared, members = self.members.shape
        return Shape(len(self.tokens), len(self.blocks), shared, members, self.parts.shape[1])

    def tensors(self, device: torch.device) -> list[Tensor]:
        """The arrays on a device, moved there as one."""
        return split(torch.from_numpy(self.packed()).to(device), self.shape)

    def packed(self) -> Ints:
        """All arrays in one."""
        return np.concatenate([getattr(self, field.name).reshape(-1) for field in fields(self)[:-1]])


def split(packed: Tensor, shape: Shape) -> list[Tensor]:
    """The arrays of a DecodeBatch in one tensor, as views of it."""
    sizes = shape.sizes
    flat = torch.split(packed, [int(np.prod(size)) for size in sizes])
    return [part.view(size) for part, size in zip(flat, sizes, strict=True)]


def decode_batch(requests: Sequence[TokenSequence]) -> DecodeBatch:
    """The arrays of a step that feeds each request its newest token."""
    tables = [request.block_table for request in requests]
    counts = np.array([len(table) for table in tables])
    lengths = np.array([request.length for request in requests])
    flat = np.array([block for table in tables for block in table], np.int64)
    row = np.repeat(np.arange(len(tables)), counts)
    place = np.arange(len(flat)) - np.repeat(counts.cumsum() - counts, counts)
    is_shared = np.bincount(flat)[flat] > 1
    positions = lengths - 1
    last = flat[counts.cumsum() - counts + positions // BLOCK]
    parts = np.full((len(tables), int(counts.max())), NOWHERE, np.int64)

    own = ~is_shared
    held = np.minimum(lengths[row] - place * BLOCK, BLOCK)
    blocks, owner, begins, written, in_place = _own(flat[own], row[own], place[own] * BLOCK, held[own])
    parts[row[own], place[own]] = flat[own] if in_place else np.arange(len(blocks))

    shared, shared_begins, members, part = _shared(flat[is_shared], row[is_shared], place[is_shared] * BLOCK)
    parts[row[is_shared], place[is_shared]] = len(blocks) + part
    return DecodeBatch(
        np.array([request.last for request in requests], np.int64),
        positions,
        last * BLOCK + positions % BLOCK,
        blocks,
        owner,
        begins,
        written,
        shared,
        shared_begins,
        members,
        parts,
        in_place,
    )


def _own(blocks: Ints, row: Ints, begins: Ints, held: Ints) -> tuple[Ints, Ints, Ints, Ints, bool]:
    """Blocks of one sequence each. If they are most of the first ones of the pool, all of those are taken instead."""
    size = int(blocks.max()) + 1 if len(blocks) else 0
    if len(blocks) < IN_PLACE * size:
        return blocks, row, begins, held, False
    spread = np.zeros((3, size), np.int64)
    spread[:, blocks] = row, begins, held
    return np.arange(size), spread[0], spread[1], spread[2], True


def _shared(blocks: Ints, row: Ints, begins: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Entries of shared blocks: block, begin, members; and which part (entry · members + member) each given one is."""
    if not len(blocks):
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, np.zeros((0, 1), np.int64), nothing
    order = np.argsort(blocks, kind="stable")
    _, first, counts = np.unique(blocks[order], return_index=True, return_counts=True)
    members = min(MEMBERS, int(counts.max()))
    rank = np.arange(len(blocks)) - np.repeat(first, counts)
    entries = -(-counts // members)
    entry = np.repeat(entries.cumsum() - entries, counts) + rank // members
    rows = np.zeros((int(entries.sum()), members), np.int64)
    rows[entry, rank % members] = row[order]
    part = np.empty(len(blocks), np.int64)
    part[order] = entry * members + rank % members
    which = order[first]
    return np.repeat(blocks[which], entries), np.repeat(begins[which], entries), rows, part


def padded(batch: DecodeBatch, size: int) -> DecodeBatch:
    """A step of few different shapes: all `size` blocks of the pool in place, the rest padded to powers of two.

    Block 0 must be scratch: rows that fill up write there.
    """
    shape = batch.shape
    rows, parts, shared = _power(shape.rows), _power(shape.parts), _power(shape.shared) if shape.shared else 0
    members = MEMBERS if shared else 1
    own = np.zeros((3, size), np.int64)
    own[:, batch.blocks] = batch.owner, batch.begins, batch.held
    entry = batch.parts - shape.blocks
    several = size + entry // shape.members * members + entry % shape.members
    mine = np.append(batch.blocks, 0)[np.minimum(batch.parts, shape.blocks)]
    where = np.where(batch.parts < shape.blocks, mine, several)
    return DecodeBatch(
        _filled(batch.tokens, (rows,)),
        _filled(batch.positions, (rows,)),
        _filled(batch.write, (rows,)),
        np.arange(size),
        own[0],
        own[1],
        own[2],
        _filled(batch.shared, (shared,)),
        _filled(batch.shared_begins, (shared,)),
        _filled(batch.members, (shared, members)),
        _filled(np.where(batch.parts < 0, NOWHERE, where), (rows, parts), NOWHERE),
        in_place=True,
    )


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _filled(array: Ints, shape: tuple[int, ...], value: int = 0) -> Ints:
    found = np.full(shape, value, np.int64)
    found[tuple(slice(size) for size in array.shape)] = array
    return found
