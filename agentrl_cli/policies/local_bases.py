"""Beginnings that several rows share: a group's prompt, the system prompt with its tools.

Each is computed once and kept once. Rows attend to it where it is (local_attention.py), all of them in one product, and
hold only what comes after it; so do episodes that wait for a tool. Models whose attention is more than a softmax over
all positions (windows, soft caps, sinks) start from a copy instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agentrl_cli.policies.local_cache import BLOCK, Layers, Shelf, rounded
from agentrl_cli.types import Int32


@dataclass(slots=True, eq=False)
class Base:
    """A row of a shelf of beginnings, and the token ids whose keys and values it holds."""

    ids: Int32
    shelf: Shelf
    row: int
    version: str
    """Of the weights that computed them."""
    length: int = 0

    def __post_init__(self) -> None:
        self.length = len(self.ids)

    @property
    def layers(self) -> Layers:
        return self.shelf.view(self.row)


class Bases:
    """The shelves of beginnings. Who uses which is told by the caller: a row that nobody names is free."""

    def __init__(self, layers: int, make: Callable[[int, int], Shelf] = Shelf) -> None:
        self.layers = layers
        self.make = make
        """A shelf of a length and a number of layers."""
        self.shelves: list[Shelf] = []

    @property
    def blocks(self) -> int:
        """Blocks that there is memory for."""
        return sum(shelf.blocks for shelf in self.shelves)

    def place(self, ids: Int32, version: str, used: Iterable[Base]) -> Base:
        """A row for a new beginning; keys and values are still to be computed into it."""
        length = base_length(len(ids))
        shelf = next((shelf for shelf in self.shelves if shelf.length == length), None)
        if shelf is None:
            shelf = self.make(length, self.layers)
            self.shelves.append(shelf)
        taken = {base.row for base in used if base.shelf is shelf}
        row = next(n for n in range(len(taken) + 1) if n not in taken)
        shelf.resize(max(shelf.rows, row + 1))
        return Base(ids, shelf, row, version)

    def trim(self, used: Iterable[Base]) -> None:
        """Give back the memory behind the last row that is used of each shelf."""
        last: dict[int, int] = {}
        for base in used:
            last[id(base.shelf)] = max(last.get(id(base.shelf), 0), base.row + 1)
        for shelf in self.shelves:
            if id(shelf) in last:
                shelf.resize(min(shelf.rows, last[id(shelf)]))
        self.shelves = [shelf for shelf in self.shelves if id(shelf) in last]


def base_length(length: int) -> int:
    """Positions of the shelf for a beginning: few different ones, each at most a quarter more than is needed."""
    unit = max(BLOCK, 1 << max(length.bit_length() - 3, 0))
    return max(-(-length // unit) * unit, rounded(1))
