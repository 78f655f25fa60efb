"""The rows that a local policy decodes: prompts in, one token a step out of each, keys and values kept in between.

Everything here runs in the policy's thread, but for what says so; the policy sees to it that the two never overlap.
Where keys and values are, and what is given up when memory is short: local_rows.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agentrl_cli.policies.local_attention import Part, Rows, one_part
from agentrl_cli.policies.local_cache import Parked, Shelf, blocks, rounded
from agentrl_cli.policies.local_engine import Engine, sampling_mode
from agentrl_cli.policies.local_request import Request, draw_tokens
from agentrl_cli.policies.local_rows import Shelves
from agentrl_cli.types import Int32

MIN_SHARED = 16
"""A common prefix shorter than this is not worth a copy."""
PREFIXES = 64
"""How many shared prompts are kept."""
PIECE = 2048
"""Prompt tokens of one row in one forward; a longer prompt is computed in pieces."""
PREFILL = 8192
"""Prompt tokens of all rows together, padding included, in one forward."""


class DecodeBatch(Shelves):
    """Live rows over shelves of keys and values. See LocalPolicy for the arguments."""

    def __init__(self, model: Any, engine: Engine, *, version: str, **limits: Any) -> None:
        embedding = model.get_input_embeddings().weight
        super().__init__(layers=int(model.config.get_text_config().num_hidden_layers), version=version, **limits)
        self.model = model
        self.engine = engine
        self.device = embedding.device
        self.vocabulary = int(embedding.shape[0])
        self.prefill_tokens = 0

    def renew(self, version: str) -> None:
        """New weights: what the old ones computed is dropped. Between two steps, in the event loop."""
        self.drop_old(version)
        self.engine.refresh()

    @torch.inference_mode()
    def step(self, fresh: list[Request]) -> list[Request]:
        """Admit, then draw one token for every row. Returns the rows, finished ones too."""
        with sampling_mode(self.model):
            if self.lanes:
                for request in fresh:
                    self._prefill(self.lane_length, [request])
            elif fresh:
                self._learn_common(fresh)
                self._learn_prompts(fresh)
                for length, requests in self._batches(fresh):
                    self._prefill(length, requests)
            self.grow()
            return self._decode_step()

    def _decode_step(self) -> list[Request]:
        parts: list[Part] = []
        rows: list[Request | None] = []
        for shelf in self.shelves:
            if shelf.live:
                # Fixed lanes keep every shape fixed, the attended length too.
                reach = shelf.length if self.lanes else rounded(max([r.length for r in shelf.live if r]))
                parts.append(Part(shelf, 0, len(shelf.live), len(rows), min(reach, shelf.length)))
                rows += shelf.live
        live = [r for r in rows if r is not None]
        if not live:
            return []
        last = torch.tensor([[r.last if r else 0] for r in rows], device=self.device)
        view = Rows(parts, [r.length - 1 if r else 0 for r in rows], 1, self.device)
        logits = self.engine(last, view, head=True)
        assert logits is not None
        if self.lanes:
            logits = logits[[n for n, r in enumerate(rows) if r is not None]]
        draw_tokens(logits, live, self.limit)
        for request in [r for r in live if r.stop is not None]:
            self.set_aside(request)
        return live

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _known(self, request: Request) -> tuple[Parked, int] | None:
        """Stored keys and values that begin as the request does, and how many of its positions they give."""
        context = request.context
        own = self.parked.get(request.key)
        entries = [own] if own is not None else []
        if not self.lanes:  # there a row's numbers must not depend on what others have computed
            entries += self.prefixes
        found = [(kept, _common(ids, context)) for ids, kept in entries if kept.version == self.version]
        best = max(found, key=lambda entry: entry[1], default=None)
        return best if best is not None and best[1] > 0 else None

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
        """Compute a prefix on a shelf of its own and keep it, unless it is short or known, or memory is."""
        if len(ids) < MIN_SHARED:
            return
        known = max(self.prefixes, key=lambda entry: _common(entry[0], ids), default=None)
        start = _common(known[0], ids) if known is not None else 0
        if start == len(ids) or not self.make_room(blocks(len(ids))):
            return
        shelf = Shelf(rounded(len(ids)), self.layers)
        shelf.resize(1)
        if known is not None and start:
            shelf.unpark([0], known[1], start)
        self._feed(shelf, 0, [ids[start:]], [start])
        self.prefixes = [*self.prefixes[-PREFIXES + 1 :], (ids, shelf.park(0, len(ids), self.version))]

    def _batches(self, fresh: list[Request]) -> list[tuple[int, list[Request]]]:
        """Requests for shelves of one length and with like much to compute, as many as one forward may hold."""
        missing = {id(r): r.length - 1 - (known[1] if (known := self._known(r)) else 0) for r in fresh}
        batches: list[tuple[int, list[Request]]] = []
        for request in sorted(fresh, key=lambda r: (self.wanted(r), missing[id(r)])):
            width = min(max(missing[id(request)], 0), PIECE)
            length = self.wanted(request)
            if batches and batches[-1][0] == length and (len(batches[-1][1]) + 1) * width <= PREFILL:
                batches[-1][1].append(request)
            else:
                batches.append((length, [request]))
        return batches

    def _prefill(self, length: int, requests: list[Request]) -> None:
        """Put requests on a shelf with keys and values of all their tokens but the last."""
        found = {id(request): self._known(request) for request in requests}
        requests = sorted(requests, key=lambda r: id(found[id(r)][0]) if found[id(r)] else 0)  # type: ignore[index]
        shelf, first = self.place(length, requests)
        starts: list[int] = []
        same: list[tuple[Parked, int, list[int]]] = []
        for row, request in enumerate(requests, first):
            known = found[id(request)]
            start = min(known[1], request.length - 1) if known else 0
            starts.append(start)
            self.parked.pop(request.key, None)  # what it holds lives on in the row
            if known is None or not start:
                continue
            if same and same[-1][0] is known[0] and same[-1][1] == start:
                same[-1][2].append(row)
            else:
                same.append((known[0], start, [row]))
        for parked, start, rows in same:
            shelf.unpark(rows, parked, start)
        self._feed(shelf, first, [r.context[start:-1] for r, start in zip(requests, starts, strict=True)], starts)

    def _feed(self, shelf: Shelf, first: int, news: list[Int32], starts: list[int]) -> None:
        """Compute keys and values of new tokens of consecutive rows, in pieces.

        Short rows are padded on the right: what the padding writes lies beyond the row's length, is masked here and
        overwritten by the tokens that come.
        """
        self.prefill_tokens += sum(len(new) for new in news)
        while any(len(new) for new in news):
            pieces = [new[:PIECE] for new in news]
            width = max(len(piece) for piece in pieces)
            padded = np.zeros((len(pieces), width), np.int64)
            for n, piece in enumerate(pieces):
                padded[n, : len(piece)] = piece
            parts = one_part(shelf, first, len(pieces), max(starts) + width)
            view = Rows(parts, starts, width, self.device)
            self.engine(torch.from_numpy(padded).to(self.device), view, head=False)
            starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
            news = [new[PIECE:] for new in news]


def _common(a: Int32, b: Int32) -> int:
    """How many leading ids two arrays share."""
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n
