"""Forwards of the fallback engine: prompts, later turns and decode steps, as few and as large as the model allows.

A group's prompt is computed once, and so is a long prefix that several prompts share. What a model can do was found by
trying it (`Abilities`, cached_forward.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.inference.batched_cache import Batch, Kept, merge
from agentrl_cli.inference.cached_forward import Abilities, CachedForward
from agentrl_cli.inference.kv_cache import common
from agentrl_cli.inference.memory import prefill_tokens
from agentrl_cli.inference.model_runner import PIECE
from agentrl_cli.inference.request import Request
from agentrl_cli.models.adapter import eval_mode, switch_length
from agentrl_cli.models.vision import Seen, reader_of
from agentrl_cli.types.content import digest
from agentrl_cli.types.groups import group_pairs

WORTH = 512
"""Tokens that a common prefix of several prompts must save to be computed before them."""


class BatchedForward:
    """Computes batches of requests with a model's own forward and cache.

    Args:
        abilities: Those of the model's cache; None: they are tried.
    Raises ModelError if the model's own forward cannot compute a text.
    """

    def __init__(self, model: Any, abilities: Abilities | None = None) -> None:
        self.model, self.forward = model, CachedForward(model)
        self.vocabulary = self.forward.vocabulary
        with eval_mode(model):
            self.abilities = abilities or Abilities.of(self.forward)
        self._switch = switch_length(model)
        if self._switch and self.abilities.batches == "any":
            # a longer one beside it would change the positions of each
            self.abilities = replace(self.abilities, batches="equal", pads=False)
        self.forward.columns = self.abilities.columns
        self.prefilled = 0
        """Prompt tokens computed."""
        self._reader = reader_of(model)
        self._most = prefill_tokens(
            model.config.get_text_config(), model.get_input_embeddings().weight.dtype.itemsize
        )

    def decode(self, batch: Batch) -> None:
        """Feed the newest token of each sequence."""
        if not self.abilities.cached:
            batch.logits = self.whole(batch.requests)
            return
        if 0 < self._switch == batch.lengths[0]:
            batch.lengths = [0] * len(batch.lengths)
            self._prefill_padded(batch)
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
                ids = torch.from_numpy(some[0].context.astype(np.int64))[None]
                ids = ids.to(self.forward.device)
                given = self._reader.arguments(self._read_images(some, [0]), [0], ids.shape[1])
                parts.append(self.model(input_ids=ids, use_cache=False, **given).logits[:, -1])
        return torch.cat(parts)

    def join_batches(self, batches: Sequence[Batch]) -> list[Batch]:
        """As few batches as the model's cache allows."""
        sets: dict[Any, list[Batch]] = {}
        for n, batch in enumerate(batch for batch in batches if batch.requests):
            keys = {"any": 0, "equal": tuple(set(batch.lengths)), "single": n}
            sets.setdefault(keys[self.abilities.batches], []).append(batch)
        return [merge(some) for some in sets.values()]

    def begin(
        self, fresh: Sequence[Request], kept: Callable[[Request], Kept | None]
    ) -> list[Batch]:
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
        looking: list[Batch] = []
        prompts: dict[bytes, list[Request]] = {}
        token = None if self._reader is None else self._reader.token
        for request in fresh:
            turn = kept(request)
            if turn is not None and len(turn.ids) <= self._switch < request.length:
                turn = None
            images = request.images if self._reader is not None else ()
            if turn is not None and (self.abilities.extends or not images):
                batch = Batch([request], [len(turn.ids)], turn.cache)
                request.shift = turn.shift
                new = bool(images) and bool((request.context[len(turn.ids) :] == token).any())
                (looking if new else continued).append(batch)
            else:
                alone = (
                    b"" if self.abilities.batches != "single" else b"%d" % request.order
                )  # its cache is not copied
                key = request.context.tobytes() + alone + "".join(map(digest, images)).encode()
                prompts.setdefault(key, []).append(request)
        for batch in self.join_batches(continued):
            out += self._extend(batch)
        return [*out, *self._looking(looking), *self._prompts(list(prompts.values()))]

    def _feed(self, batch: Batch, ids: Tensor) -> None:
        """Feed as many tokens [B, n] of each sequence."""
        shifts = [request.shift for request in batch.requests]
        batch.logits, batch.cache = self.forward(ids, batch.lengths, batch.cache, shifts=shifts)
        batch.lengths = [length + ids.shape[1] for length in batch.lengths]

    def _extend(self, batch: Batch) -> list[Batch]:
        """Feed each sequence what its cache lacks of its context: equal numbers of tokens at a time, no padding."""
        out: list[Batch] = []
        while batch.requests:
            lacks = [
                request.length - length
                for request, length in zip(batch.requests, batch.lengths, strict=True)
            ]
            most = PIECE if self.abilities.extends or not batch.lengths[0] else 1
            count = min(*lacks, max(1, min(most, self._most // len(lacks))))
            ids = np.stack(
                [
                    r.context[at : at + count]
                    for r, at in zip(batch.requests, batch.lengths, strict=True)
                ]
            )
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
        shown = [request for request in first if self._reader is not None and request.images]
        plain = [request for request in first if self._reader is None or not request.images]
        # Contexts with images are computed whole: as many at a time as a forward may hold, and none is cut.
        seen = [Batch(some, [0] * len(some), None) for some in self._alike(shown)]
        begun = self._first(plain) if plain else []
        for batch in [*begun, *map(self._prefill_padded, seen)]:
            several = [n for n, request in enumerate(batch.requests) for _ in copies[id(request)]]
            everyone = [request for request in batch.requests for request in copies[id(request)]]
            if len(several) > len(batch.requests):
                batch = batch.part(several)
            for request in batch.requests:
                for other in copies[id(request)]:
                    other.shift = request.shift
            batch.requests = everyone
            out.append(batch)
        return out

    def _first(self, requests: list[Request]) -> list[Batch]:
        """Different contexts, the shortest first, on empty caches."""
        contexts = [request.context for request in requests]
        shared = min((common(contexts[0], other) for other in contexts[1:]), default=0)
        shared = min([shared, *(len(context) - 1 for context in contexts)])
        if (
            self.abilities.extends
            and self.abilities.batches != "single"
            and shared * (len(contexts) - 1) >= WORTH
            and not self._switch
        ):
            prefix = Batch(requests[:1], [0], None)
            for at in range(0, shared, PIECE):
                ids = contexts[0][at : min(at + PIECE, shared)].astype(np.int64)
                self._feed(prefix, torch.from_numpy(ids)[None].to(self.forward.device))
            self.prefilled += shared
            several = prefix.part([0] * len(requests))
            several.requests = requests
            return self._extend(several)
        out: list[Batch] = []
        for some in self._alike(requests):
            empty = Batch(some, [0] * len(some), None)
            whole = self.abilities.pads and some[-1].length <= PIECE
            whole = whole or 0 < self._switch < some[-1].length
            out += [self._prefill_padded(empty)] if whole else self._extend(empty)
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

    def _prefill_padded(self, batch: Batch) -> Batch:
        """Whole contexts in one forward, padded on the left."""
        lengths = [request.length for request in batch.requests]
        ids = np.zeros((len(lengths), max(lengths)), np.int64)
        for line, request in zip(ids, batch.requests, strict=True):
            line[len(line) - request.length :] = request.context
        padding = [max(lengths) - length for length in lengths]
        given = torch.from_numpy(ids).to(self.forward.device)
        images = self._reader is not None and any(request.images for request in batch.requests)
        seen = self._read_images(batch.requests, batch.lengths) if images else None
        batch.logits, batch.cache = self.forward(
            given, batch.lengths, None, padding=padding, seen=seen
        )
        self.prefilled += sum(lengths)
        batch.lengths = lengths
        return batch

    # --- images ------------------------------------------------------------------------------------------------------

    def _looking(self, batches: Sequence[Batch]) -> list[Batch]:
        """Later turns with new images: those that lack equally many tokens together, as an image is not cut."""
        sets = group_pairs((one.requests[0].length - one.lengths[0], one) for one in batches)
        out = [batch for some in sets.values() for batch in self.join_batches(some)]
        for batch in out:
            ids = [
                request.context[at:]
                for request, at in zip(batch.requests, batch.lengths, strict=True)
            ]
            new = torch.from_numpy(np.stack(ids).astype(np.int64)).to(self.forward.device)
            seen = self._read_images(batch.requests, batch.lengths)
            batch.logits, batch.cache = self.forward(new, batch.lengths, batch.cache, seen=seen)
            batch.lengths = [request.length for request in batch.requests]
            self.prefilled += new.numel()
        return out

    def _read_images(self, requests: Sequence[Request], starts: Sequence[int]) -> Seen:
        """Positions and new images of contexts from `starts` on."""
        assert self._reader is not None
        device, images = self.forward.device, [request.images for request in requests]
        contexts = [torch.from_numpy(r.context.astype(np.int64)).to(device) for r in requests]
        seen = self._reader.gather(self.model, contexts, images, starts)
        for request, shift in zip(requests, seen.shifts, strict=True):
            request.shift = shift
        return seen
