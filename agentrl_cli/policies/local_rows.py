"""Who has a row, on which shelf, and what is given up when the memory for keys and values is short.

Memory is counted in blocks of positions, of all layers together. A request is admitted where its row finds blocks that
are free, or held by what can be computed again: shared prompts and episodes that wait for a tool. Where the live rows
outgrow the rest, the youngest gives way: it loses its row, waits again, and is recomputed from its tokens, which stay.
The oldest is never disturbed, so somebody always gets on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.local_bases import Base, Bases
from agentrl_cli.policies.local_cache import BLOCK, Incoming, Layers, Parked, Shelf, blocks, rounded, shelf_length
from agentrl_cli.policies.local_request import Request
from agentrl_cli.types import Int32

MIN_SHARED = 16
"""A common prefix shorter than this is not worth a copy."""
FEW = 8
"""A shelf of so many rows is not made smaller when turns end."""
Kept = tuple[Int32, Parked]
"""Token ids, and their keys and values."""


class Shelves:
    """Rows on shelves within a number of blocks.

    Args:
        rows: Most live rows.
        lanes: One shelf, a fixed row per episode.
        lane_length: Positions of a lane.
        apart: Every row has a shelf of its own.
        limit: Most positions of an episode.
        budget: Blocks that all keys and values may take, those set aside too.
    """

    def __init__(
        self,
        *,
        layers: int,
        version: str,
        rows: int,
        lanes: bool,
        lane_length: int,
        limit: int,
        budget: int,
        apart: bool = False,
    ) -> None:
        self.layers = layers
        self.version = version
        self.most = rows
        self.lanes = lanes
        self.sharing = False
        """Rows attend to common beginnings where those are; else they start from copies."""
        self.apart = apart
        self.lane_length = rounded(lane_length)
        self.budget = budget
        self.limit = min(limit, budget * BLOCK)
        self.make: Callable[[int, int], Shelf] = Shelf
        """A shelf of a length and a number of layers."""
        self.shelves: list[Shelf] = []
        self.lane_of: dict[str, int] = {}
        self.parked: dict[str, Kept] = {}
        self.bases = Bases(layers)
        self.prefixes: list[Base] = []
        """Beginnings that new rows may share."""
        self.planned: list[Base] = []
        """Those that rows about to be placed will use."""
        self.preempted: list[Request] = []
        """Those who gave way; the policy lets them wait again."""
        self.preemptions = 0
        self.peak = 0
        """Most blocks that were ever in use."""
        self.clear()

    @property
    def requests(self) -> list[Request]:
        return [request for shelf in self.shelves for request in shelf.live if request is not None]

    @property
    def used(self) -> int:
        """Blocks that there is memory for now."""
        parked = sum(parked.blocks for _, parked in self.parked.values())
        return sum(shelf.blocks for shelf in self.shelves) + parked + self.bases.blocks

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values that are there now, by the tensors themselves."""
        stores = [t for shelf in (*self.shelves, *self.bases.shelves) for t in (*shelf.keys, *shelf.values)]
        stores += [t for _, parked in self.parked.values() for pair in parked.layers for t in pair]
        return sum(t.numel() * t.element_size() for t in stores if t is not None)

    def in_use(self) -> list[Base]:
        """Beginnings that rows, parked episodes or plans hold on to."""
        held = [r.base for r in self.requests] + [parked.base for _, parked in self.parked.values()]
        return [*(base for base in held if base is not None), *self.planned]

    # --- between two steps, in the event loop -------------------------------------------------------------------------

    def has_room(self, request: Request, taken: list[Request]) -> bool:
        """Whether a request finds a row, when those of `taken` have theirs."""
        if self.lanes:
            return self._claim_lane(request)
        live = self.requests
        if len(live) + len(taken) >= self.most:
            return False
        held = sum(len(shelf.live) * (shelf.length // BLOCK) for shelf in self.shelves)
        base = self._expected(request, taken)
        bases = {r.base for r in live if r.base is not None} | ({base} if base is not None else set())
        held += sum(blocks(base.length) for base in bases)
        return held + sum(blocks(self.wanted(r)) for r in (*taken, request)) <= self.budget

    def _expected(self, request: Request, taken: list[Request]) -> Base | None:
        """Note how much of a waiting request's context will be shared, by what is known or by one of `taken`.

        Returns the beginning where it is there already; one that is to come counts with whoever brings it.
        """
        request.expected = 0
        if not self.sharing or request.lost:
            return None
        parked = self.parked.get(request.key)
        base = None if parked is None else parked[1].base
        if parked is None:
            ids = request.ids[:-1]
            base = next((b for b in self.prefixes if b.length == len(ids) and np.array_equal(b.ids, ids)), None)
            if base is None and len(ids) >= MIN_SHARED and any(np.array_equal(r.ids, request.ids) for r in taken):
                request.expected = len(ids)
        request.expected = request.expected if base is None else base.length
        return base

    def wanted(self, request: Request) -> int:
        """Positions of the shelf that a request is put on: its context, and some of what it may say."""
        shared = max(request.shared, request.expected)
        local = request.length - shared
        more = min(request.sampling.max_new_tokens - len(request.out), max(BLOCK, local // 2))
        return self._shelf_length(local + max(more, 0), shared)

    @torch.inference_mode()
    def vacate(self, request: Request) -> None:
        """Free a row; the last row of a shelf moves into the gap, but for lanes."""
        shelf = next(shelf for shelf in self.shelves if request in shelf.live)
        row = shelf.live.index(request)
        if self.apart:
            shelf.live.clear()
            self.shelves.remove(shelf)
            return
        if self.lanes:
            shelf.live[row] = None
            if not any(shelf.live):
                shelf.live.clear()
            return
        mover = shelf.live.pop()
        if mover is not None and mover is not request:
            shelf.take(row, shelf, len(shelf.live), mover.local)
            shelf.live[row] = mover

    def forget(self, key: str) -> None:
        """Drop an episode's keys and values and its lane."""
        self.parked.pop(key, None)
        self.lane_of.pop(key, None)

    def drop_old(self, version: str) -> None:
        """New weights: what was set aside by the old ones is dropped."""
        self.version = version
        self.parked.clear()
        self.prefixes.clear()
        self.bases.trim(self.in_use())

    def clear(self) -> None:
        """Drop everything, the memory too."""
        for kept in (self.shelves, self.lane_of, self.parked, self.prefixes, self.preempted, self.planned):
            kept.clear()
        self.bases.shelves.clear()
        if self.lanes:  # from the start at its full size: strides are shapes, too
            shelf = Shelf(self.lane_length, self.layers)
            shelf.resize(self.most)
            self.shelves.append(shelf)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def place(
        self, length: int, requests: list[Request], moves: Mapping[int, tuple[int, Layers]]
    ) -> tuple[Shelf, int] | None:
        """A shelf of this length and the first of consecutive rows on it for new requests.

        `moves`: by a request's number, how many positions of which parked row move in; they are no longer parked.
        None where memory is short after all, since beginnings take some, too: then they wait again, to be computed
        without any.
        """
        if self.lanes:
            shelf, lane = self.shelves[0], self.lane_of[requests[0].key]
            if not shelf.live:
                shelf.live = [None] * self.most
            shelf.live[lane] = requests[0]
            shelf.resize(shelf.rows, [Incoming(lane, *move) for move in moves.values()])
            return shelf, lane
        shelf = self._shelf(length)
        if not self._reserve(shelf, len(requests), [Incoming(len(shelf.live) + n, *move) for n, move in moves.items()]):
            if not self.requests and not self.planned and all(r.lost for r in requests):
                raise PolicyError(
                    "There is no memory left for keys and values.", hint="Raise rollout.memory, or lower concurrency."
                )
            for request in requests:
                request.share(None)
                request.lost = True
            self.preempted += requests
            return None
        shelf.live.extend(requests)
        return shelf, len(shelf.live) - len(requests)

    def resume(self, request: Request, parked: Parked) -> Shelf | None:
        """The row that an episode was parked with, its own again, if there is room for a block more."""
        shelf = parked.shelf
        if shelf is None or shelf.length < request.local + BLOCK:
            return None
        shelf.live.append(request)
        self.shelves.append(shelf)
        return shelf

    def set_aside(self, request: Request) -> None:
        """Park a row whose turn is over: its next turn starts from there. Not where memory is short."""
        shelf = next(shelf for shelf in self.shelves if request in shelf.live)
        held, local = request.context[:-1], request.local - 1
        if self.apart:
            self.vacate(request)
            if len(held):
                parked = Parked(local, shelf.kept(), self.version, request.base, shelf)
                self.parked[request.key] = (held, parked)
            return
        if len(held) and self.make_room(blocks(local), keep=True):
            parked = shelf.park(shelf.live.index(request), local, self.version, request.base)
            self.parked[request.key] = (held, parked)
            self.peak = max(self.peak, self.used)
        self.vacate(request)
        if not shelf.live and not self.lanes and 4 * self.used > self.budget:
            self.shelves.remove(shelf)  # else it is kept: the next turns will want it
        elif not self.lanes and shelf.rows > FEW and 2 * len(shelf.live) <= shelf.rows:
            shelf.resize(max(len(shelf.live), FEW))  # what was set aside has its own memory

    def grow(self) -> None:
        """Move rows that have become too long for their shelf to a longer one; the oldest first.

        Where they are more than half of their shelf, the shelf itself becomes longer: no row is there twice.
        """
        if self.lanes:
            return
        for shelf in self.shelves:
            self._lengthen(shelf)
        tall = [(r, s) for s in self.shelves for r in s.live if r is not None and r.local > s.length]
        for request, shelf in sorted(tall, key=lambda entry: entry[0].order):
            if request not in shelf.live:
                continue  # it has given way to an older one
            need = blocks(self._shelf_length(request.local + BLOCK, request.shared))
            while not self.make_room(need) and self._preempt():
                if request not in shelf.live:
                    break
            if request in shelf.live:
                self._lift(request, shelf)

    def _lengthen(self, shelf: Shelf) -> None:
        tall = [r for r in shelf.live if r is not None and r.local > shelf.length]
        if 2 * len(tall) <= len(shelf.live):
            return
        length = max(self._shelf_length(r.local + BLOCK, r.shared) for r in tall)
        if not self.apart and any(other.length == length for other in self.shelves):
            return
        if self.used + shelf.rows * (length - shelf.length) // BLOCK > self.budget:
            shelf.resize(len(shelf.live))
        if self.make_room(shelf.rows * (length - shelf.length) // BLOCK):
            shelf.lengthen(length)
            self.peak = max(self.peak, self.used)

    def make_room(self, need: int, keep: bool = False) -> bool:
        """See to it that so many blocks are free, by giving up slack, then beginnings, then parked episodes.

        `keep`: give up slack alone.
        """
        if self.used + need <= self.budget:
            return True
        for shelf in self.shelves:
            shelf.resize(len(shelf.live))
        self._drop_empty()
        self.bases.trim([*self.in_use(), *self.prefixes])
        while not keep and self.used + need > self.budget:
            used = self.in_use()
            idle = next((base for base in self.prefixes if base not in used), None)
            if idle is not None:
                self.prefixes.remove(idle)
            elif self.parked:
                _, given = self.parked.pop(next(iter(self.parked)))
                given.shelf = None  # at once, also where a row about to be placed was to begin with it
            else:
                break
            self.bases.trim([*self.in_use(), *self.prefixes])
        return self.used + need <= self.budget

    def _lift(self, request: Request, shelf: Shelf) -> None:
        length = request.local - 1  # the newest token is not fed yet
        target = self._shelf(self._shelf_length(request.local + BLOCK, request.shared))
        assert self._reserve(target, 1), "`grow` made room"
        target.live.append(request)
        target.take(len(target.live) - 1, shelf, shelf.live.index(request), length)
        target.live.pop()  # so that `vacate` finds it where it was
        self.vacate(request)
        target.live.append(request)

    def _preempt(self) -> bool:
        """Let the youngest row give way. False where there is none."""
        youngest = max(self.requests, key=lambda r: r.order, default=None)
        if youngest is None:
            return False
        self.vacate(youngest)
        youngest.share(None)
        youngest.lost = True
        self.preempted.append(youngest)
        self.preemptions += 1
        return True

    def _shelf(self, length: int) -> Shelf:
        for shelf in self.shelves:
            if shelf.length == length and not self.apart:
                return shelf
        self.shelves.append(self.make(length, self.layers))
        return self.shelves[-1]

    def _reserve(self, shelf: Shelf, more: int, incoming: Sequence[Incoming] = ()) -> bool:
        """Memory for more rows, with some slack where there is plenty; False where there is not enough."""
        rows, each = len(shelf.live) + more, shelf.length // BLOCK
        if rows <= shelf.rows:
            shelf.resize(shelf.rows, incoming)
            return True
        slack = min(max(rows // 2, 8), self.most - rows) if shelf.rows else 0  # rows come one by one
        if self.used + (rows + slack - shelf.rows) * each <= self.budget:
            rows += slack
        elif not self.make_room((rows - shelf.rows) * each):
            return False
        shelf.resize(rows, incoming)
        if shelf not in self.shelves:
            self.shelves.append(shelf)
        self.peak = max(self.peak, self.used)
        return True

    def _drop_empty(self) -> None:
        if not self.lanes:
            self.shelves = [shelf for shelf in self.shelves if shelf.live]

    def _shelf_length(self, length: int, shared: int) -> int:
        """Of the shelf for a row of this length after `shared` positions: no episode is longer than the limit."""
        return min(shelf_length(length, self.apart), rounded(self.limit - shared))

    def _claim_lane(self, request: Request) -> bool:
        """Give an episode its lane until `forget`; False where it must wait for one.

        The arithmetic of a row may depend on where it stands, so one with a slot waits for its own, whatever is free.
        """
        if request.key in self.lane_of:
            return True
        owned = set(self.lane_of.values())
        slot = request.sampling.slot
        wanted = range(self.most) if slot < 0 else [slot % self.most]
        lane = next((lane for lane in wanted if lane not in owned), None)
        if lane is not None:
            self.lane_of[request.key] = lane
        return lane is not None
