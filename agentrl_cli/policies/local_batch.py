"""The rows that a local policy decodes: prompts in, one token a step out of each, keys and values kept in between.

Everything here runs in the policy's thread, but for what says so; the policy sees to it that the two never overlap.
Where keys and values are, and what is given up when memory is short: local_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agentrl_cli.policies.local_attention import Part, Rows, Seen, one_part
from agentrl_cli.policies.local_bases import Base, base_length
from agentrl_cli.policies.local_cache import Layers, Parked, Shelf, blocks, rounded
from agentrl_cli.policies.local_engine import Engine, sampling_mode
from agentrl_cli.policies.local_kernel import Ragged
from agentrl_cli.policies.local_memory import prefill_tokens
from agentrl_cli.policies.local_request import Notes, Request, draw_tokens
from agentrl_cli.policies.local_rows import MIN_SHARED, Kept, Shelves
from agentrl_cli.policies.local_sharing import Sharing, share
from agentrl_cli.types import Int32

PREFIXES = 64
"""How many shared prompts are kept."""
CATCH_UP = 128
"""New tokens of a row that are fed together with the next step of the others, where the engine can."""
PIECE = 2048
"""Prompt tokens of one row in one forward; a longer prompt is computed in pieces."""
Place = tuple[Shelf, int]
"""A shelf and a row of it."""


@dataclass(frozen=True, slots=True)
class Begin:
    """What a new row begins with: the first `start` positions of its context are known."""

    start: int = 0
    base: Base | None = None
    """Attended to where it is."""
    source: Parked | Base | None = None
    """What comes after the base is copied from here."""


class DecodeBatch(Shelves):
    """Live rows over shelves of keys and values. See LocalPolicy for the arguments."""

    def __init__(self, model: Any, engine: Engine, *, version: str, **limits: Any) -> None:
        embedding = model.get_input_embeddings().weight
        layers, apart = int(model.config.get_text_config().num_hidden_layers), engine.packs and not limits["lanes"]
        super().__init__(layers=layers, version=version, apart=apart, **limits)
        self.model = model
        self.engine = engine
        self.device = embedding.device
        self.vocabulary = int(embedding.shape[0])
        self.prefill_tokens = 0
        self.notes = Notes()
        self.sharing = not self.lanes and self.limit <= engine.shares
        self._shared: tuple[list[Base | None], Sharing | None] = ([], None)
        """What the rows of the newest step begin with."""
        self.together = prefill_tokens(model.config.get_text_config(), embedding.dtype.itemsize)
        """Most prompt tokens of all rows in one forward."""

    @property
    def why(self) -> str:
        """Why no faster way is taken; empty for the fastest."""
        return self.engine.why

    def renew(self, version: str) -> None:
        """New weights: what the old ones computed is dropped. Between two steps, in the event loop."""
        self.drop_old(version)
        self.engine.refresh()

    def clear(self) -> None:
        """Drop everything, the memory too."""
        super().clear()
        self._shared = [], None

    def rest(self) -> None:
        """Nobody samples for a while, and others want the memory."""
        self.clear()

    @torch.inference_mode()
    def step(self, fresh: list[Request]) -> list[Request]:
        """Admit, then draw one token for every row. Returns the rows, finished ones too."""
        # An engine over a copy leaves the model alone: another thread may be training it.
        with nullcontext() if self.engine.copies else sampling_mode(self.model):
            if self.lanes:
                for request in fresh:
                    self._prefill(self.lane_length, [request], [self._begin(request)])
            elif fresh:
                self._learn_common(fresh)
                self._learn_prompts(fresh)
                for length, requests, begins in self._batches(fresh):
                    self._prefill(length, requests, begins)
                self.planned.clear()
            self.grow()
            return self._decode_step()

    def _decode_step(self) -> list[Request]:
        rows: list[Request | None] = [request for shelf in self.shelves for request in shelf.live]
        live = [r for r in rows if r is not None]
        if not live:
            return []
        logits = self._packed(rows) if self.engine.packs else self._padded(rows, live)
        if self.lanes:
            logits = logits[[n for n, r in enumerate(rows) if r is not None]]
        self._draw(logits, live)
        for request in [r for r in live if r.stop is not None]:
            self.set_aside(request)
        return live

    def _draw(self, logits: torch.Tensor, live: list[Request]) -> None:
        draw_tokens(logits, live, self.limit, self.notes)

    def _packed(self, rows: list[Request | None]) -> torch.Tensor:
        """Logits of every row, each fed with all that it has not been fed yet."""
        places = [(shelf, row) for shelf in self.shelves for row in range(len(shelf.live))]
        counts = [r.unfed if r else 1 for r in rows]
        starts = [r.length - r.unfed if r else 0 for r in rows]
        bases = [r.base if r else None for r in rows]
        tokens: list[int] = []
        for r in rows:
            tokens += [r.last if r else 0] if r is None or r.unfed == 1 else r.context[-r.unfed :].tolist()
        logits = self.engine.packed(torch.tensor(tokens), Ragged(places, starts, counts, bases))
        for r in rows:
            if r is not None:
                r.unfed = 1
        return logits

    def _padded(self, rows: list[Request | None], live: list[Request]) -> torch.Tensor:
        """Logits of every row, each fed with its newest token."""
        parts: list[Part] = []
        for shelf in self.shelves:
            if shelf.live:
                # Fixed lanes keep every shape fixed, the attended length too.
                reach = shelf.length if self.lanes else rounded(max([r.local for r in shelf.live if r]))
                first = parts[-1].offset + parts[-1].count if parts else 0
                parts.append(Part(shelf, 0, len(shelf.live), first, min(reach, shelf.length)))
        last = torch.tensor([[r.last if r else 0] for r in rows], device=self.device)
        bases = [r.base for r in live] if self.sharing else []
        if bases != self._shared[0]:  # most steps have the rows of the one before
            self._shared = bases, share(bases, self.device)
        view = Rows(parts, [r.length - 1 if r else 0 for r in rows], 1, self.device, self._shared[1])
        logits = self.engine(last, view, head=True)
        assert logits is not None
        return logits

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> Begin:
        """The longest known beginning of a request's context; its last token is never part of it."""
        context, last = request.context, request.length - 1
        best = Begin()
        # With lanes a row must not depend on what others computed; one that memory was short for holds nothing else.
        for base in [] if self.lanes or request.lost else self.prefixes:
            start = min(_common(base.ids, context), last) if base.version == self.version else 0
            whole = self.sharing and start == base.length
            if start > best.start or (whole and start == best.start and start):
                best = Begin(start, base) if whole else Begin(start, source=base)
        ids, own = (context[:0], None) if request.lost else self.parked.get(request.key, (context[:0], None))
        start = min(_common(ids, context), last)
        if own is None or own.version != self.version or start <= best.start:
            return best
        if own.base is None or start >= own.base.length:
            return Begin(start, own.base, own)
        return Begin(start, source=own.base)

    def _learn_common(self, fresh: list[Request]) -> None:
        """Compute once, and keep, what the new prompts have in common (the system prompt with its tools)."""
        prompts = list({r.ids.tobytes(): r.ids for r in fresh if r.key not in self.parked}.values())
        if len(prompts) > 1:
            ordered = sorted(prompts, key=lambda ids: ids.tolist())
            self._learn(ordered[0][: _common(ordered[0], ordered[-1])])

    def _learn_prompts(self, fresh: list[Request]) -> None:
        """Compute once, and keep, prompts that several of the new requests share."""
        same: dict[bytes, list[Request]] = {}
        for request in fresh:
            if request.key not in self.parked:
                same.setdefault(request.ids.tobytes(), []).append(request)
        for requests in same.values():
            if len(requests) > 1:
                self._learn(requests[0].ids[:-1])

    def _learn(self, ids: Int32) -> None:
        """Compute a beginning and keep it, unless it is short or known, or memory is."""
        if len(ids) < MIN_SHARED:
            return
        known = max(self.prefixes, key=lambda base: _common(base.ids, ids), default=None)
        start = _common(known.ids, ids) if known is not None else 0
        if known is not None and start == len(ids) and (start == known.length or not self.sharing):
            return
        self.planned = [known] if known is not None else []
        if self.make_room(blocks(base_length(len(ids)))):
            base = self.bases.place(ids, self.version, [*self.in_use(), *self.prefixes])
            if known is not None and start:
                base.shelf.fill([base.row], known.layers, start)
            self.prefixes = [*self.prefixes[-PREFIXES + 1 :], base]
            self._feed([(base.shelf, base.row)], [ids[start:]], [start])
            self.peak = max(self.peak, self.used)
        self.planned.clear()

    def _batches(self, fresh: list[Request]) -> list[tuple[int, list[Request], list[Begin]]]:
        """Requests for shelves of one length and with like much to compute, as many as one forward may hold."""
        begins = {id(request): self._begin(request) for request in fresh}
        for request in fresh:
            begin = begins[id(request)]
            request.share(begin.base)
            self.planned += [base for base in (begin.base, begin.source) if isinstance(base, Base)]
        batches: list[tuple[int, list[Request], list[Begin]]] = []
        for request in sorted(fresh, key=lambda r: (self.wanted(r), r.length - begins[id(r)].start)):
            width = min(request.length - 1 - begins[id(request)].start, PIECE, self.together)
            length = self.wanted(request)
            if batches and self._alike(batches[-1][0], length) and (len(batches[-1][1]) + 1) * width <= self.together:
                batches[-1][1].append(request)
            else:
                batches.append((length, [request], []))
        for _, requests, found in batches:
            requests.sort(key=lambda r: id(begins[id(r)].source))
            found += [begins[id(request)] for request in requests]
        return batches

    def _alike(self, length: int, other: int) -> bool:
        """Whether rows for shelves of these lengths may be computed together."""
        return not self.apart and length == other

    def _prefill(self, length: int, requests: list[Request], begins: list[Begin]) -> None:
        """Put requests on a shelf with keys and values of all their tokens but the last."""
        parked = {r.key: self.parked.pop(r.key) for r in requests if r.key in self.parked}
        placed = self._resumed(requests[0], begins[0], parked) or self.place(length, requests, _moves(begins))
        if placed is None:
            self.parked |= parked
            return
        shelf, first = placed
        same: list[tuple[Begin, list[int]]] = []
        for row, begin in enumerate(begins, first):
            if not isinstance(begin.source, Base):
                continue
            if same and same[-1][0] == begin:
                same[-1][1].append(row)
            else:
                same.append((begin, [row]))
        for begin, rows in same:
            assert begin.source is not None
            shelf.fill(rows, begin.source.layers, begin.start - (0 if begin.base is None else begin.base.length))
        starts = [begin.start for begin in begins]
        news = [r.context[start:-1] for r, start in zip(requests, starts, strict=True)]
        total = sum(map(len, news))
        if self.apart and total <= CATCH_UP and total + sum(r.unfed for r in self.requests) <= self.together:
            self.prefill_tokens += total
            for request, new in zip(requests, news, strict=True):
                request.unfed = len(new) + 1
            return
        for request in requests:
            request.unfed = 1  # one that gave way may not have caught up before
        places = [(shelf, row) for row in range(first, first + len(news))]
        self._feed(places, news, starts, [begin.base for begin in begins])

    def _resumed(self, request: Request, begin: Begin, parked: dict[str, Kept]) -> tuple[Shelf, int] | None:
        """The row that an episode was parked with, where its turn goes on from there; else its shelf is given up."""
        _, own = parked.get(request.key, (None, None))
        shelf = self.resume(request, own) if own is not None and own is begin.source else None
        if own is not None and shelf is None:
            own.shelf = None  # its keys and values move, layer by layer
        return None if shelf is None else (shelf, 0)

    def _feed(
        self, places: list[Place], news: list[Int32], starts: list[int], bases: Sequence[Base | None] = ()
    ) -> None:
        """Compute keys and values of new tokens of rows, in pieces.

        Short rows are padded on the right: what the padding writes lies beyond the row's length, is masked here and
        overwritten by the tokens that come.
        """
        self.prefill_tokens += sum(len(new) for new in news)
        while any(len(new) for new in news):
            size = min(PIECE, self.together)
            pieces = [new[:size] for new in news]
            width = max(len(piece) for piece in pieces)
            padded = np.zeros((len(pieces), width), np.int64)
            for n, piece in enumerate(pieces):
                padded[n, : len(piece)] = piece
            view = self._view(places, starts, [len(piece) for piece in pieces], bases)
            self.engine(torch.from_numpy(padded).to(self.device), view, head=False)
            starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
            news = [new[size:] for new in news]

    def _view(self, places: list[Place], starts: list[int], counts: list[int], bases: Sequence[Base | None]) -> Seen:
        """What a forward of so many new tokens a row works on; the rows are consecutive ones of one shelf."""
        width = max(counts)
        held = [0 if base is None else base.length for base in bases] or [0] * len(starts)
        reach = max(start - own for start, own in zip(starts, held, strict=True)) + width
        parts = one_part(*places[0], len(places), reach)
        return Rows(parts, starts, width, self.device, share(bases, self.device))


def _moves(begins: list[Begin]) -> dict[int, tuple[int, Layers]]:
    """Positions and parked keys and values that move onto a shelf, by the number of the row."""
    return {
        n: (begin.start - (0 if begin.base is None else begin.base.length), begin.source.layers)
        for n, begin in enumerate(begins)
        if isinstance(begin.source, Parked)
    }


def _common(a: Int32, b: Int32) -> int:
    """How many leading ids two arrays share."""
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n
