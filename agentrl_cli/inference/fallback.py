"""The fallback engine: continuous batching over the model's own forward and transformers' own cache.

For models whose layers keep a state that is not a list of keys and values (linear attention, state spaces), a latent,
or compressed keys, that read images or have positions of three dimensions, or whose attention the paged engine does not
support. What a model can do is tried when the engine is made (cached_forward.py).

All running sequences are one batch with one cache, padded on the left. Prompts are computed beside it, equal ones once,
and join it; a sequence that ends leaves it, and its cache is kept for the next turn of its episode. A turn is computed
again if its context does not continue what was kept: a state cannot be cut back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.errors import PolicyError
from agentrl_cli.inference.batched_cache import Batch, Kept, merge
from agentrl_cli.inference.cached_forward import Abilities, CachedForward
from agentrl_cli.inference.kv_cache import common
from agentrl_cli.inference.memory import prefill_tokens
from agentrl_cli.inference.model_runner import PIECE, sampling_mode
from agentrl_cli.inference.request import Request
from agentrl_cli.inference.sampler import sample
from agentrl_cli.models.vision import positions, reader_of

WORTH = 512
"""Tokens that a common prefix of several prompts must save to be computed before them."""


class FallbackEngine:
    """Running requests in as few batches as the model's cache allows.

    Args:
        why: Why the paged engine does not serve the model.
        rows: Most running requests.
        limit: Most positions of a sequence.
        memory: Bytes that all caches together may take.
    Raises ModelError if the model's own forward cannot compute a text.
    """

    name = "fallback"
    records = False

    def __init__(self, model: Any, *, why: str, rows: int, limit: int, memory: int) -> None:
        self.model = model
        self.forward = CachedForward(model)
        with sampling_mode(model):
            self.abilities = Abilities.of(self.forward)
        self.why = f"{why}; {self.abilities.limits}" if self.abilities.limits else why
        self.limit, self.vocabulary = limit, self.forward.vocabulary
        self.preempted: list[Request] = []
        self._batches: list[Batch] = []
        self._rows, self._memory, self._reader = rows, memory, reader_of(model)
        self._most = prefill_tokens(model.config.get_text_config(), model.get_input_embeddings().weight.dtype.itemsize)
        self._shifts: dict[int, int] = {}
        """By request: what the position of a token is ahead of its number, after the images that were seen."""
        self._turns: dict[str, Kept] = {}
        """Finished turns by episode, the oldest first."""
        self._prefilled = self._preemptions = self._peak = 0

    @property
    def running(self) -> list[Request]:
        return [request for batch in self._batches for request in batch.requests]

    @property
    def used(self) -> int:
        """Bytes of all caches, by what the trial found of a sequence and a token; padding counts."""
        size = self.abilities.bytes
        running = sum(len(batch.requests) * size(max(batch.lengths)) for batch in self._batches)
        return running + sum(size(len(kept.ids)) for kept in self._turns.values())

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        found = {
            "rollout/kv_bytes": float(self.used),
            "rollout/kv_bytes_peak": float(self._peak),
            "rollout/preemptions": float(self._preemptions),
            "rollout/prefill_tokens": float(self._prefilled),
        }
        if reset:
            self._peak = self._preemptions = self._prefilled = 0
        return found

    # --- between two steps -------------------------------------------------------------------------------------------

    def admit(self, waiting: Iterable[Request]) -> list[Request]:
        """The first ones for which there are slots and, beside others, memory."""
        running = self.running
        room = self._memory - sum(map(self._bytes, running))
        taken: list[Request] = []
        for request in islice(waiting, self._rows - len(running)):
            room -= self._bytes(request)
            if room < 0 and (running or taken):
                break
            taken.append(request)
        return taken

    def _bytes(self, request: Request) -> int:
        """What the cache of a request takes, by the trial, with some of what may be drawn."""
        more = min(request.sampling.max_new_tokens - len(request.out), max(32, request.length // 2))
        return self.abilities.bytes(request.length + more)

    def remove(self, request: Request) -> None:
        self._shifts.pop(id(request), None)
        for batch in [batch for batch in self._batches if request in batch.requests]:
            self._batches.remove(batch)
            rest = batch.part([n for n, other in enumerate(batch.requests) if other is not request])
            self._batches += [rest] if rest.requests else []

    def forget(self, key: str) -> None:
        self._turns.pop(key, None)

    def renew(self, version: str) -> None:
        self._turns.clear()

    def rest(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._batches.clear()
        self._shifts.clear()
        self._turns.clear()
        self.preempted.clear()

    # --- a step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, fresh: list[Request]) -> list[Request]:
        """Begin some requests, then draw one token for every running one. Returns those, finished ones too."""
        with sampling_mode(self.model):
            self._shrink(fresh)
            for batch in self._batches:
                self._decode(batch)
            self._batches = self._joined([*self._batches, *self._begun(fresh)])
            live = self.running
            if not live:
                return []
            logits = [batch.logits for batch in self._batches if batch.logits is not None]
            sample(logits[0] if len(logits) == 1 else torch.cat(logits), live, self.limit)
        for batch in self._batches:
            batch.logits = None
        self._peak = max(self._peak, self.used)
        self._finish([request for request in live if request.stop is not None])
        return live

    def _decode(self, batch: Batch) -> None:
        """Feed the newest token of each sequence."""
        if not self.abilities.cached:
            batch.logits = self._whole(batch.requests)
            return
        ids = torch.tensor([[request.last] for request in batch.requests], device=self.forward.device)
        self._feed(batch, ids)

    def _feed(self, batch: Batch, ids: Tensor) -> None:
        """Feed as many tokens [B, n] of each sequence."""
        shifts = [self._shifts.get(id(request), 0) for request in batch.requests]
        batch.logits, batch.cache = self.forward(ids, batch.lengths, batch.cache, shifts=shifts)
        batch.lengths = [length + ids.shape[1] for length in batch.lengths]

    def _whole(self, requests: Sequence[Request]) -> Tensor:
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

    def _joined(self, batches: Sequence[Batch]) -> list[Batch]:
        """As few batches as the model's cache allows."""
        sets: dict[Any, list[Batch]] = {}
        for n, batch in enumerate(batch for batch in batches if batch.requests):
            keys = {"any": 0, "equal": tuple(set(batch.lengths)), "single": n}
            sets.setdefault(keys[self.abilities.batches], []).append(batch)
        return [merge(some) for some in sets.values()]

    def _finish(self, done: Sequence[Request]) -> None:
        """Take finished sequences out, and keep their caches for the next turns of their episodes."""
        if not done:
            return
        ended = set(map(id, done))
        for number, batch in enumerate(self._batches):
            leaving = [n for n, request in enumerate(batch.requests) if id(request) in ended]
            if not leaving:
                continue
            for n in leaving if self.abilities.cached else ():
                request, alone = batch.requests[n], batch.part([n])
                self._turns[request.key] = Kept(request.context[: alone.lengths[0]], alone.cache)
            staying = [n for n in range(len(batch.requests)) if n not in leaving]
            self._batches[number] = batch.part(staying)
        self._batches = [batch for batch in self._batches if batch.requests]
        for request in done:
            self._shifts.pop(id(request), None)

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _begun(self, fresh: Sequence[Request]) -> list[Batch]:
        """Batches of new requests, with the logits after their contexts."""
        if not self.abilities.cached:
            batch = Batch(list(fresh), [0] * len(fresh), None)
            if fresh:
                batch.logits = self._whole(fresh)
            return [batch]
        out: list[Batch] = []
        continued: list[Batch] = []
        prompts: dict[bytes, list[Request]] = {}
        for request in fresh:
            kept = self._continued(request)
            if self._reader is not None and request.images:
                out.append(self._with_images(request, kept))
            elif kept is not None:
                continued.append(Batch([request], [len(kept.ids)], kept.cache))
            else:
                alone = b"" if self.abilities.batches != "single" else b"%d" % request.order  # its cache is not copied
                prompts.setdefault(request.context.tobytes() + alone, []).append(request)
        for batch in self._joined(continued):
            out += self._extended(batch)
        return out + self._prompts(list(prompts.values()))

    def _continued(self, request: Request) -> Kept | None:
        """The cache of the episode's last turn, if the context continues it."""
        kept = self._turns.pop(request.key, None)
        if kept is None or len(kept.ids) >= request.length or common(kept.ids, request.context) < len(kept.ids):
            return None
        return kept

    def _extended(self, batch: Batch) -> list[Batch]:
        """Feed each sequence what its cache lacks of its context: equal numbers of tokens at a time, no padding."""
        out: list[Batch] = []
        while batch.requests:
            lacks = [request.length - length for request, length in zip(batch.requests, batch.lengths, strict=True)]
            most = PIECE if self.abilities.extends or not batch.lengths[0] else 1
            count = min(*lacks, max(1, min(most, self._most // len(lacks))))
            ids = np.stack([r.context[at : at + count] for r, at in zip(batch.requests, batch.lengths, strict=True)])
            self._feed(batch, torch.from_numpy(ids.astype(np.int64)).to(self.forward.device))
            self._prefilled += ids.size
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
            self._prefilled += shared
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
        self._prefilled += sum(lengths)
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
        self._prefilled += new.shape[1]
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

    # --- memory ------------------------------------------------------------------------------------------------------

    def _shrink(self, fresh: Sequence[Request]) -> None:
        """Drop finished turns, then preempt the youngest sequences, while the caches take more than they may."""
        coming = {request.key for request in fresh}
        more = sum(self.abilities.bytes(request.length) for request in fresh if request.key not in self._turns)
        for key in [key for key in self._turns if key not in coming]:
            if self.used + more <= self._memory:
                break
            self._turns.pop(key)
        while len(running := self.running) > 1 and self.used > self._memory:
            youngest = max(running, key=lambda request: request.order)
            self.remove(youngest)
            self.preempted.append(youngest)
            self._preemptions += 1
        if running and self.used > self._memory and running[0].length > len(running[0].ids):
            raise PolicyError(
                f"An episode of {running[0].length} tokens takes more than the {self._memory} bytes that it may.",
                hint="Raise rollout.memory, or lower rollout.max_tokens.",
            )
