"""The fallback engine: the model's own forward and transformers' own cache, one sequence after the other.

For models whose layers keep a state that is no list of keys and values (linear attention, recurrent layers), that read
images or have positions of three dimensions, or whose attention the paged engine does not know. Nothing is shared
between episodes, and a turn is computed again where its context does not continue what the cache holds: a state cannot
be cut back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agentrl_cli.errors import PolicyError
from agentrl_cli.inference.model_runner import sampling_mode
from agentrl_cli.inference.request import Request
from agentrl_cli.inference.sampler import sample
from agentrl_cli.models.vision import positions, reader_of
from agentrl_cli.types import Int32

Kept = tuple[Int32, Any]
"""Token ids, and the transformers cache that has computed them."""


class FallbackEngine:
    """Running requests, each with a cache of its own.

    Args:
        why: Why the paged engine does not serve the model.
        rows: Most running requests. They do not meet in any product: their numbers are their own.
        limit: Most positions of a sequence.
        memory: Bytes that all caches together may take.
    """

    name = "fallback"
    records = False

    def __init__(self, model: Any, *, why: str, rows: int, limit: int, memory: int) -> None:
        embedding = model.get_input_embeddings().weight
        self.model = model
        self.why, self.limit = why, limit
        self.vocabulary = int(embedding.shape[0])
        self.preempted: list[Request] = []
        self.running: list[Request] = []
        self._device, self._rows, self._memory = embedding.device, rows, memory
        self._reader = reader_of(model)
        self._shifts: dict[int, int] = {}
        """By request: what the position of a token is ahead of its number, after the images that were seen."""
        self._live: dict[int, Kept] = {}
        self._turns: dict[str, Kept] = {}
        """Finished turns by episode."""
        self._prefilled = self._preemptions = self._peak = 0

    @property
    def used(self) -> int:
        """Bytes of all caches."""
        return sum(_bytes(cache) for _, cache in (*self._live.values(), *self._turns.values()))

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

    def admit(self, waiting: Sequence[Request]) -> list[Request]:
        """As many as there are rows for; beside others only while the caches are within the memory."""
        if self.running and self.used > self._memory:
            return []
        return list(waiting[: self._rows - len(self.running)])

    def remove(self, request: Request) -> None:
        """Free a row."""
        self.running.remove(request)
        self._live.pop(id(request), None)
        self._shifts.pop(id(request), None)

    def forget(self, key: str) -> None:
        """Drop an episode's cache."""
        self._turns.pop(key, None)

    def renew(self, version: str) -> None:
        """New weights: what the old ones computed is dropped."""
        self._turns.clear()

    def rest(self) -> None:
        """Nobody samples for a while, and others want the memory."""
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.running.clear()
        self._live.clear()
        self._shifts.clear()
        self._turns.clear()
        self.preempted.clear()

    @torch.inference_mode()
    def step(self, fresh: list[Request]) -> list[Request]:
        """Admit, then draw one token for every row. Returns the rows, finished ones too."""
        self.running += fresh
        with sampling_mode(self.model):
            self._shrink()
            live = list(self.running)
            if not live:
                return []
            sample(torch.cat([self._logits(request) for request in live]), live, self.limit)
        self._peak = max(self._peak, self.used)
        for request in [r for r in live if r.stop is not None]:
            self._turns[request.key] = self._live[id(request)]
            self.remove(request)
        return live

    def _logits(self, request: Request) -> torch.Tensor:
        """[1, vocabulary] after a request's context; what its cache lacks is computed."""
        context = request.context
        held, cache = self._live.get(id(request)) or self._continued(request)
        new = context[len(held) :]
        self._prefilled += len(new) - 1
        out = self.model(
            input_ids=torch.from_numpy(new.astype(np.int64))[None].to(self._device),
            past_key_values=cache,
            use_cache=True,
            **self._seen(request, context, len(held)),
        )
        self._live[id(request)] = (context, out.past_key_values)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _seen(self, request: Request, context: Int32, start: int) -> dict[str, torch.Tensor]:
        """Positions and new images of a context from `start` on, for a model that reads images."""
        if self._reader is None:
            return {}
        if id(request) in self._shifts:  # a token that the request drew itself, and no image's
            place = start + self._shifts[id(request)]
            return {"position_ids": torch.full((3, 1, len(context) - start), place, device=self._device)}
        ids = torch.from_numpy(context.astype(np.int64)).to(self._device)
        everything = self._reader.inputs(ids, request.images)
        where = positions(self.model, ids, everything, self._reader.token)
        found = self._reader.inputs(ids, request.images, start) if start else everything
        if where is None:
            return found
        self._shifts[id(request)] = int(where.max()) + 1 - len(ids)
        return {**found, "position_ids": where[..., start:]}

    def _continued(self, request: Request) -> Kept:
        """The episode's cache, where the context continues it; else a new one."""
        ids, cache = self._turns.pop(request.key, (np.zeros(0, np.int32), None))
        if cache is not None and len(ids) < request.length and np.array_equal(ids, request.context[: len(ids)]):
            return ids, cache
        from transformers import DynamicCache

        return np.zeros(0, np.int32), DynamicCache(config=self.model.config.get_text_config())

    def _shrink(self) -> None:
        """Give up episodes that wait, then the youngest rows, while the caches take more than they may."""
        while self._turns and self.used > self._memory:
            self._turns.pop(next(iter(self._turns)))
        while len(self.running) > 1 and self.used > self._memory:
            youngest = max(self.running, key=lambda r: r.order)
            self.remove(youngest)
            self.preempted.append(youngest)
            self._preemptions += 1
        if self.used > self._memory and self.running[0].length > len(self.running[0].ids):
            raise PolicyError(
                f"An episode of {self.running[0].length} tokens takes more than the {self._memory} bytes that it may.",
                hint="Raise rollout.memory, or lower rollout.max_tokens.",
            )


def _bytes(holder: Any) -> int:
    """Bytes of every tensor that a transformers cache holds, in its layers and their states."""
    if isinstance(holder, torch.Tensor):
        return holder.numel() * holder.element_size()
    if isinstance(holder, dict):
        return sum(map(_bytes, holder.values()))
    if isinstance(holder, list | tuple):
        return sum(map(_bytes, holder))
    return sum(map(_bytes, vars(holder).values())) if type(holder).__module__.startswith("transformers.cache") else 0
