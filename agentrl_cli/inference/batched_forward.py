"""Forwards of the fallback engine: prompts, later turns and decode steps, as few and as large as the model allows.

A group's prompt is computed once, and so is a long prefix that several prompts share. What a model can do was found by
trying it (`Abilities`, cached_forward.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.inference.batched_cache import Batch, Kept, merge
from agentrl_cli.inference.cached_forward import Abilities, CachedForward
from agentrl_cli.inference.kv_cache import common
from agentrl_cli.inference.memory import prefill_tokens
from agentrl_cli.inference.model_runner import PIECE, sampling_mode
from agentrl_cli.inference.request import Request
from agentrl_cli.models.vision import positions, reader_of

WORTH = 512
"""Tokens that a common prefix of several prompts must save to be computed before them."""


class BatchedForward:
    """Computes batches of requests with a model's own forward and cache.

    Args:
        abilities: What the model's cache can do; None: it is tried.
    Raises ModelError if the model's own forward cannot compute a text.
    """

    def __init__(self, model: Any, abilities: Abilities | None = None) -> None:
        self.model, self.forward = model, CachedForward(model)
        self.vocabulary = self.forward.vocabulary
        with sampling_mode(model):
            self.abilities = abilities or Abilities.of(self.forward)
        self.forward.columns = self.abilities.columns
        self.prefilled = 0
        """Prompt tokens computed."""
        self._reader = reader_of(model)
        self._most = prefill_tokens(model.config.get_text_config(), model.get_input_embeddings().weight.dtype.itemsize)
        self._shifts: dict[int, int] = {}
        """By request: what the position of a token is ahead of its number, after the images that were seen."""

    def forget(self, request: Request) -> None:
        """A request has ended or left."""
        self._shifts.pop(id(request), None)

    def clear(self) -> None:
        """All requests have left."""
        self._shifts.clear()

    def decode(self, batch: Batch) -> None:
        """Feed the newest token of each sequence."""
        if not self.abilities.cached:
            batch.logits = self.whole(batch.requests)
            return
        ids = self.forward.integers([request.last for request in batch.requests])
        self._feed(batch, ids[:, None])

    def whole(self, requests: Sequence[Request]) -> Tensor:
        """Logits after whole contexts, if nothing can be kept."""
        together = self.abilities.batches == "any" and self._reader is None
        most = max(1, self._most // max(request.length for request in requests)) if together else 1
        parts = []
        for at in range(0, len(requests), most):
            some = requests[at : at + most]
            if self._reader is None:
                parts.append(self.forward.plain([request.context for request in some]))
            else:
                ids = torch.from_numpy(some[0].context.astype(np.int64))[None].to(self.forward.device)
                seen = self._seen(some[0], 0)
                parts.append(self.model(input_ids=ids, use_cache=False, **seen).logits[:, -1])
        return torch.cat(parts)

    def joined(self, batches: Sequence[Batch]) -> list[Batch]:
        """As few batches as the model's cache allows."""
        sets: dict[Any, list[Batch]] = {}
        for n, batch in enumerate(batch for batch in batches if batch.requests):
            keys = {"any": 0, "equal": tuple(set(batch.lengths)), "single": n}
            sets.setdefault(keys[self.abilities.batches], []).append(batch)
        return [merge(some) for some in sets.values()]

    def begin(self, fresh: Sequence[Request], kept: Callable[[Request], Kept | None]) -> list[Batch]:
        """Batches of new requests, with the logits after their contexts.

        `kept` returns the cache of a finished turn that a request continues; None if absent.
        """
        if not self.abilities.cached:
            batch = Batch(list(fresh), [0] * len(fresh), None)
            if fresh:
                batch.logits = self.whole(fresh)
            return [batch]
        out: list[Batch] = []
        continued: list[Batch] = []
        prompts: dict[bytes, list[Request]] = {}
        for request in fresh:
            turn = kept(request)
            if self._reader is not None and request.images:
                out.append(self._with_images(request, turn))
            elif turn is not None:
                continued.append(Batch([request], [len(turn.ids)], turn.cache))
            else:
                alone = b"" if self.abilities.batches != "single" else b"%d" % request.order  # its cache is not copied
                prompts.setdefault(request.context.tobytes() + alone, []).append(request)
        for batch in self.joined(continued):
            out += self._extended(batch)
        return out + self._prompts(list(prompts.values()))

    def _feed(self, batch: Batch, ids: Tensor) -> None:
        """Feed as many tokens [B, n] of each sequence."""
        shifts = [self._shifts.get(id(request), 0) for request in batch.requests]
        batch.logits, batch.cache = self.forward(ids, batch.lengths, batch.cache, shifts=shifts)
        batch.lengths = [length + ids.shape[1] for length in batch.lengths]

    def _extended(self, batch: Batch) -> list[Batch]:
        """Feed each sequence what its cache lacks of its context: equal numbers of tokens at a time, no padding."""
        out: list[Batch] = []
        while batch.requests:
            lacks = [request.length - length for request, length in zip(batch.requests, batch.lengths, strict=True)]
            most = PIECE if self.abilities.extends or not batch.lengths[0] else 1
            count = min(*lacks, max(1, min(most, self._most // len(lacks))))
            ids = np.stack([r.context[at : at + count] for r, at in zip(batch.requests, batch.lengths, strict=True)])
            self._feed(batch, torch.from_numpy(ids.astype(np.int64)).to(self.forward.device))
            self.prefilled += ids.size
            ready = [n for n, lack in enumerate(lacks) if lack == count]
            if len(ready) == len(lacks):
                return [*out, batch]
            if ready:
                out.append(batch.part(ready))
                batch = batch.part([n for n, lack in enumerate(lacks) if lack > count])
        return out

    def _prompts(self, prompts: list[list[Request]]) -> list[Batch]:
        """New contexts: each once, then a copy of its cache for each request."""
        first = sorted((requests[0] for requests in prompts), key=lambda request: request.length)
        copies = {id(requests[0]): requests for requests in prompts}
        out: list[Batch] = []
        for batch in self._first(first):
            several = [n for n, request in enumerate(batch.requests) for _ in copies[id(request)]]
            everyone = [request for request in batch.requests for request in copies[id(request)]]
            if len(several) > len(batch.requests):
                batch = batch.part(several)
            batch.requests = everyone
            out.append(batch)
        return out

    def _first(self, requests: list[Request]) -> list[Batch]:
        """Different contexts, the shortest first, on empty caches."""
        contexts = [request.context for request in requests]
        shared = min((common(contexts[0], other) for other in contexts[1:]), default=0)
        shared = min([shared, *(len(context) - 1 for context in contexts)])
        if self.abilities.extends and self.abilities.batches != "single" and shared * (len(contexts) - 1) >= WORTH:
            prefix = Batch(requests[:1], [0], None)
            for at in range(0, shared, PIECE):
                ids = contexts[0][at : min(at + PIECE, shared)].astype(np.int64)
                self._feed(prefix, torch.from_numpy(ids)[None].to(self.forward.device))
            self.prefilled += shared
            several = prefix.part([0] * len(requests))
            several.requests = requests
            return self._extended(several)
        out: list[Batch] = []
        for some in self._alike(requests):
            empty = Batch(some, [0] * len(some), None)
            whole = self.abilities.pads and some[-1].length <= PIECE
            out += [self._padded(empty)] if whole else self._extended(empty)
        return out

    def _alike(self, requests: list[Request]) -> Iterable[list[Request]]:
        """Contexts that are computed in one forward: of all lengths or of equal ones, as many as it may hold."""
        parts: list[list[Request]] = []
        for request in requests:
            part = parts[-1] if parts else []
            fits = part and (len(part) + 1) * min(request.length, PIECE) <= self._most
            alike = self.abilities.pads or (
                self.abilities.batches != "single" and part and part[0].length == request.length
            )
            if fits and alike:
                part.append(request)
            else:
                parts.append([request])
        return parts

    def _padded(self, batch: Batch) -> Batch:
        """Whole contexts in one forward, padded on the left."""
        lengths = [request.length for request in batch.requests]
        ids = np.zeros((len(lengths), max(lengths)), np.int64)
        for line, request in zip(ids, batch.requests, strict=True):
            line[len(line) - request.length :] = request.context
        padding = [max(lengths) - length for length in lengths]
        given = torch.from_numpy(ids).to(self.forward.device)
        batch.logits, batch.cache = self.forward(given, batch.lengths, None, padding=padding)
        self.prefilled += sum(lengths)
        batch.lengths = lengths
        return batch

    # --- images ------------------------------------------------------------------------------------------------------

    def _with_images(self, request: Request, kept: Kept | None) -> Batch:
        """A request with images, alone: their pixels belong to its own tokens."""
        start = 0 if kept is None or not self.abilities.extends else len(kept.ids)
        new = torch.from_numpy(request.context[start:].astype(np.int64))[None].to(self.forward.device)
        cache = kept.cache if kept is not None and start else None
        batch = Batch([request], [request.length], None)
        batch.logits, batch.cache = self.forward(new, [start], cache, seen=self._seen(request, start))
        self.prefilled += new.shape[1]
        return batch

    def _seen(self, request: Request, start: int) -> dict[str, Tensor]:
        """Positions and new images of a context from `start` on."""
        assert self._reader is not None
        ids = torch.from_numpy(request.context.astype(np.int64)).to(self.forward.device)
        everything = self._reader.inputs(ids, request.images)
        where = positions(self.model, ids, everything, self._reader.token)
        found = self._reader.inputs(ids, request.images, start) if start else everything
        if where is None:
            return found
        self._shifts[id(request)] = int(where.max()) + 1 - len(ids)
        return {**found, "position_ids": where[..., start:]}
