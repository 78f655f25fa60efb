"""The fallback engine: continuous batching over the model's own forward and transformers' own cache.

For models whose layers keep a state that is not a list of keys and values (linear attention, state spaces), a latent,
or compressed keys, that read images or have positions of three dimensions, or whose attention the paged engine does not
support. A model's abilities are tried when the engine is made (cached_forward.py).

All running sequences are one batch with one cache, padded on the left. Prompts are computed beside it, equal ones once,
and join it; a sequence that ends leaves it, and its cache is kept for the next turn of its episode. A turn is computed
again if its context does not continue the kept one: a state cannot be cut back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from agentrl_cli.errors import PolicyError
from agentrl_cli.inference.batched_cache import Batch, Kept
from agentrl_cli.inference.batched_forward import BatchedForward
from agentrl_cli.inference.kv_cache import common
from agentrl_cli.inference.request import Request
from agentrl_cli.inference.sampler import sample
from agentrl_cli.models.adapter import eval_mode


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
        self.forward = BatchedForward(model)
        self.abilities = self.forward.abilities
        self.why = f"{why}; {self.abilities.limits}" if self.abilities.limits else why
        self.limit, self.vocabulary = limit, self.forward.vocabulary
        self.preempted: list[Request] = []
        self._batches: list[Batch] = []
        self._rows, self._memory = rows, memory
        self._turns: dict[str, Kept] = {}
        """Finished turns by episode, the oldest first."""
        self._preemptions = self._peak = 0

    @property
    def running(self) -> list[Request]:
        return [request for batch in self._batches for request in batch.requests]

    @property
    def used(self) -> int:
        """Bytes of all caches, by the trial's bytes of a sequence and a token; padding counts."""
        size = self.abilities.bytes
        running = sum(len(batch.requests) * size(max(batch.lengths)) for batch in self._batches)
        return running + sum(size(len(kept.ids)) for kept in self._turns.values())

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        found = {
            "rollout/kv_bytes": float(self.used),
            "rollout/kv_bytes_peak": float(self._peak),
            "rollout/preemptions": float(self._preemptions),
            "rollout/prefill_tokens": float(self.forward.prefilled),
        }
        if reset:
            self._peak = self._preemptions = self.forward.prefilled = 0
        return found

    # --- between two steps -------------------------------------------------------------------------------------------

    def admit(self, waiting: Iterable[Request]) -> list[Request]:
        """Return the first ones for which there are slots and, beside others, memory."""
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
        """Return the bytes of a request's cache, by the trial, with some of the tokens to come."""
        more = min(request.sampling.max_new_tokens - len(request.out), max(32, request.length // 2))
        return self.abilities.bytes(request.length + more)

    def remove(self, request: Request) -> None:
        for batch in [batch for batch in self._batches if request in batch.requests]:
            self._batches.remove(batch)
            rest = batch.part([n for n, other in enumerate(batch.requests) if other is not request])
            self._batches += [rest] if rest.requests else []

    def forget(self, key: str) -> None:
        self._turns.pop(key, None)

    def renew(self) -> None:
        self._turns.clear()

    def rest(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._batches.clear()
        self._turns.clear()
        self.preempted.clear()

    # --- a step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, fresh: list[Request]) -> list[Request]:
        """Begin some requests, then draw one token for every running one. Returns those, finished ones too."""
        with eval_mode(self.model):
            self._shrink(fresh)
            for batch in self._batches:
                self.forward.decode(batch)
            self._batches = self.forward.join_batches(
                [*self._batches, *self.forward.begin(fresh, self._find_kept)]
            )
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

    def _find_kept(self, request: Request) -> Kept | None:
        """Return the cache of the episode's last turn, if the context continues it."""
        kept = self._turns.pop(request.key, None)
        if (
            kept is None
            or len(kept.ids) >= request.length
            or common(kept.ids, request.context) < len(kept.ids)
        ):
            return None
        return kept

    def _finish(self, done: Sequence[Request]) -> None:
        """Take finished sequences out, and keep their caches for the next turns of their episodes."""
        ended = set(map(id, done))
        for number, batch in enumerate(self._batches):
            leaving = [n for n, request in enumerate(batch.requests) if id(request) in ended]
            if not leaving:
                continue
            for n in leaving if self.abilities.cached else ():
                request, alone = batch.requests[n], batch.part([n])
                ids = request.context[: alone.lengths[0]]
                self._turns[request.key] = Kept(ids, alone.cache, request.shift)
            staying = [n for n in range(len(batch.requests)) if n not in leaving]
            self._batches[number] = batch.part(staying)
        self._batches = [batch for batch in self._batches if batch.requests]

    # --- memory ------------------------------------------------------------------------------------------------------

    def _shrink(self, fresh: Sequence[Request]) -> None:
        """Drop finished turns, then preempt the youngest sequences, while the caches take more than they may."""
        coming = {request.key for request in fresh}
        more = sum(
            self.abilities.bytes(request.length)
            for request in fresh
            if request.key not in self._turns
        )
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
