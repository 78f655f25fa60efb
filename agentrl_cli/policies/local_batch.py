"""The rows that a local policy decodes: prompts in, one token a step out of each, keys and values kept in between.

Everything here runs in the policy's thread, but for what says so; the policy sees to it that the two never overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.local_cache import Arena, Parked
from agentrl_cli.policies.local_mask import Masks
from agentrl_cli.policies.local_request import Request
from agentrl_cli.policies.local_sampling import Draw, draw
from agentrl_cli.types import Int32

MIN_SHARED = 16
"""A common prefix shorter than this is not worth a copy."""
BLOCK = 32
"""Attention lengths are rounded up to this many positions, so that kernels see few shapes."""
PREFIXES = 16
"""How many shared prompts are kept."""
PIECE = 2048
"""Prompt tokens of one row in one forward; a longer prompt is computed in pieces."""
PREFILL = 8192
"""Prompt tokens of all rows together, padding included, in one forward."""

Kept = tuple[Int32, Parked]
"""Token ids, and their keys and values."""


class DecodeBatch:
    """Live rows over one arena. See LocalPolicy for the arguments."""

    def __init__(
        self, model: Any, *, context_length: int, rows: int, lanes: bool, lane_length: int, version: str
    ) -> None:
        embedding = model.get_input_embeddings().weight
        self.model = model
        self.context_length = context_length
        self.most = rows
        self.lanes = lanes
        self.lane_length = lane_length
        self.version = version
        self.device = embedding.device
        self.vocabulary = int(embedding.shape[0])
        self.prefill_tokens = 0
        self.live: list[Request | None] = []
        self.lane_of: dict[str, int] = {}
        self.parked: dict[str, Kept] = {}
        self.prefixes: list[Kept] = []
        self._masks = Masks(model.config, embedding.dtype, context_length)
        self._arena = self._new_arena()

    @property
    def requests(self) -> list[Request]:
        return [request for request in self.live if request is not None]

    # --- between two steps, in the event loop -------------------------------------------------------------------------

    def has_room(self, request: Request, taken: list[Request]) -> bool:
        """Whether a request finds a row, when those of `taken` have theirs."""
        if self.lanes:
            return self._claim_lane(request)
        return len(self.live) + len(taken) < self.most

    @torch.inference_mode()
    def vacate(self, request: Request) -> None:
        """Free a row; in a dense batch the last one moves into the gap."""
        row = self.live.index(request)
        if self.lanes:
            self.live[row] = None
            return
        mover = self.live.pop()
        if mover is not request:
            assert mover is not None
            self._arena.move(len(self.live), row, mover.length)
            self.live[row] = mover

    def forget(self, key: str) -> None:
        """Drop an episode's keys and values and its lane."""
        self.parked.pop(key, None)
        self.lane_of.pop(key, None)

    def renew(self, version: str) -> None:
        """New weights: what the old ones computed is dropped."""
        self.version = version
        self.parked.clear()
        self.prefixes.clear()

    def clear(self) -> None:
        """Drop everything, the memory too."""
        for kept in (self.live, self.lane_of, self.parked, self.prefixes):
            kept.clear()
        self._arena = self._new_arena()

    def _new_arena(self) -> Arena:
        arena = Arena(int(self.model.config.get_text_config().num_hidden_layers))
        if self.lanes:  # from the start at its full size: strides are shapes, too
            arena.reserve(self.most, _rounded(self.lane_length))
        return arena

    # --- a step, in the thread ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, fresh: list[Request]) -> list[Request]:
        """Admit, then draw one token for every row. Returns the rows, finished ones too."""
        training = self.model.training
        if training:
            self.model.eval()
        try:
            if self.lanes:
                for request in fresh:
                    self._prefill([request])
            elif fresh:
                self._learn_common(fresh)
                self._learn_prompts(fresh)
                for batch in self._batches(fresh):
                    self._prefill(batch)
            return self._decode_step()
        finally:
            if training:
                self.model.train()

    def _decode_step(self) -> list[Request]:
        live = [r for r in self.live if r is not None]
        rows = self.live if self.lanes else live
        last = [np.asarray([r.last if r else 0], np.int32) for r in rows]
        starts = [r.length - 1 if r else 0 for r in rows]
        # Fixed lanes keep every shape fixed, the attended length too.
        reach = max(self.lane_length if self.lanes else 0, max(starts) + 1)
        logits = self._forward(0, last, starts, _rounded(reach))[:, -1]
        if self.lanes:
            logits = logits[[n for n, r in enumerate(self.live) if r is not None]]
        numbers = torch.tensor([r.number for r in live], dtype=torch.float64, device=self.device)
        self._take(live, draw(logits, [r.sampling for r in live], numbers))
        for request in [r for r in live if r.stop is not None]:
            row = self.live.index(request)
            held = request.held()
            self.parked[request.key] = (held, self._arena.park(row, len(held), self.version))
            self.vacate(request)
        return live

    def _take(self, requests: list[Request], drawn: Draw) -> None:
        ids = drawn.ids.tolist()
        facts = torch.stack((drawn.logp_sampled, drawn.logp_policy, drawn.entropy), 1).cpu()
        if not bool(torch.isfinite(facts).all()):
            raise PolicyError(
                "The model's probabilities are not numbers.",
                hint="Its weights have diverged: take an older checkpoint.",
            )
        top_ids, top_logps = drawn.top_ids.cpu().numpy(), drawn.top_logps.cpu().numpy()
        for n, (request, row) in enumerate(zip(requests, facts.tolist(), strict=True)):
            request.take(ids[n], tuple(row), (top_ids[n], top_logps[n]), self.context_length)

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _known(self, request: Request) -> tuple[Parked, int] | None:
        """Stored keys and values that begin as the request does, and how many of its positions they give."""
        own = self.parked.get(request.key)
        entries = [own] if own is not None else []
        if not self.lanes:  # there a row's numbers must not depend on what others have computed
            entries += self.prefixes
        found = [(kept, _common(ids, request.ids)) for ids, kept in entries if kept.version == self.version]
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
            same.setdefault(request.ids.tobytes(), []).append(request)
        for requests in same.values():
            if len(requests) > 1:
                self._learn(requests[0].ids[:-1])

    def _learn(self, ids: Int32) -> None:
        """Compute a prefix in a row behind the batch and keep it, unless it is short or known."""
        if len(ids) < MIN_SHARED:
            return
        kept = [entry for entry in self.prefixes if entry[1].version == self.version]
        known = max(kept, key=lambda entry: _common(entry[0], ids), default=None)
        start = _common(known[0], ids) if known is not None else 0
        if start == len(ids):
            return
        row = len(self.live)
        self._arena.reserve(row + 1, _rounded(len(ids)))
        if known is not None and start:
            self._arena.unpark(row, known[1], start)
        self._feed(row, [ids[start:]], [start])
        self.prefixes = [*kept[-PREFIXES + 1 :], (ids, self._arena.park(row, len(ids), self.version))]

    def _batches(self, fresh: list[Request]) -> list[list[Request]]:
        """Requests whose missing prompts are of like length, as many as one forward may hold."""
        missing = {id(r): len(r.ids) - 1 - (known[1] if (known := self._known(r)) else 0) for r in fresh}
        batches: list[list[Request]] = []
        for request in sorted(fresh, key=lambda r: missing[id(r)]):
            width = min(max(missing[id(request)], 0), PIECE)
            if batches and (len(batches[-1]) + 1) * width <= PREFILL and len(batches[-1]) < self.most:
                batches[-1].append(request)
            else:
                batches.append([request])
        return batches

    def _prefill(self, requests: list[Request]) -> None:
        """Put requests into the batch with keys and values of all their tokens but the last."""
        first = self._place(requests)
        known = [self._known(request) for request in requests]
        starts = [min(k[1], len(r.ids) - 1) if k else 0 for k, r in zip(known, requests, strict=True)]
        self._arena.reserve(first + len(requests), _rounded(max(len(r.ids) for r in requests)))
        for offset, (entry, start) in enumerate(zip(known, starts, strict=True)):
            if entry is not None:
                self._arena.unpark(first + offset, entry[0], start)
        self._feed(first, [r.ids[start:-1] for r, start in zip(requests, starts, strict=True)], starts)

    def _place(self, requests: list[Request]) -> int:
        """Rows for new requests: the end of the dense batch, or the one request's own lane."""
        if not self.lanes:
            self.live.extend(requests)
            return len(self.live) - len(requests)
        request = requests[0]
        if not self.live:
            self.live = [None] * self.most
        lane = self.lane_of[request.key]
        self.live[lane] = request
        return lane

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

    def _feed(self, row: int, news: list[Int32], starts: list[int]) -> None:
        """Compute keys and values of new tokens of consecutive rows, in pieces."""
        self.prefill_tokens += sum(len(new) for new in news)
        while any(len(new) for new in news):
            pieces = [new[:PIECE] for new in news]
            self._forward(row, pieces, starts)
            starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
            news = [new[PIECE:] for new in news]

    # --- the forward -------------------------------------------------------------------------------------------------

    def _forward(self, row: int, news: list[Int32], starts: list[int], length: int = 0) -> torch.Tensor:
        """Feed new tokens of consecutive rows; logits at the last position, [rows, 1, vocabulary].

        Short rows are padded on the right: what the padding writes lies beyond the row's length, is masked here and
        overwritten by the tokens that come.
        """
        width = max(len(new) for new in news)
        length = max(length, max(starts) + width)
        self._arena.reserve(row + len(news), _rounded(length))
        padded = np.zeros((len(news), width), np.int64)
        for n, new in enumerate(news):
            padded[n, : len(new)] = new
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)[None]
        self._arena.window(row, len(news), length, positions, starts[0])
        out = self.model(
            input_ids=torch.from_numpy(padded).to(self.device),
            position_ids=positions,
            attention_mask=self._masks(positions, length),
            past_key_values=self._arena,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1:]
        return logits


def _common(a: Int32, b: Int32) -> int:
    """How many leading ids two arrays share."""
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n


def _rounded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
