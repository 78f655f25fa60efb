"""The engine `plain`: the model's own forward and transformers' own cache, one row after the other.

For models whose layers keep a state that is no list of keys and values (linear attention, recurrent layers), that read
images or have positions of three dimensions, or whose attention the shared engine does not know. Nothing is shared
between episodes, and a turn is computed anew where its context does not continue what the cache holds: a state cannot
be cut back. It has the interface of DecodeBatch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.local_engine import sampling_mode
from agentrl_cli.policies.local_request import Notes, Request, draw_tokens
from agentrl_cli.policies.local_vision import positions, reader_of
from agentrl_cli.types import Int32

Kept = tuple[Int32, Any]
"""Token ids, and the transformers cache that has computed them."""


class PlainBatch:
    """Live rows, each with a cache of its own. `memory`: bytes that all caches together may take."""

    def __init__(self, model: Any, *, version: str, rows: int, limit: int, memory: int, lanes: bool = False) -> None:
        embedding = model.get_input_embeddings().weight
        self.model = model
        self.device = embedding.device
        self.vocabulary = int(embedding.shape[0])
        self.version = version
        self.most = 1 if lanes else rows  # rows do not meet in any product: their numbers are their own anyway
        self.limit = limit
        self.memory = memory
        self._reader = reader_of(model)
        self.why = ""
        """Why no faster engine runs this model."""
        self._shifts: dict[int, int] = {}
        """By request: what the position of a token is ahead of its number, after the images that were seen."""
        self.prefill_tokens = 0
        self.notes = Notes()
        self.preempted: list[Request] = []
        self.preemptions = 0
        self.peak = 0
        self.requests: list[Request] = []
        self._live: dict[int, Kept] = {}
        self.parked: dict[str, Kept] = {}

    @property
    def used(self) -> int:
        """Bytes of all caches."""
        return sum(_bytes(cache) for _, cache in (*self._live.values(), *self.parked.values()))

    def has_room(self, request: Request, taken: list[Request]) -> bool:
        """Whether a request may join; with others live only while their caches are within the memory."""
        rows = len(self.requests) + len(taken)
        return rows < self.most and (rows == 0 or self.used <= self.memory)

    def vacate(self, request: Request) -> None:
        """Free a row."""
        self.requests.remove(request)
        self._live.pop(id(request), None)
        self._shifts.pop(id(request), None)

    def forget(self, key: str) -> None:
        """Drop an episode's cache."""
        self.parked.pop(key, None)

    def renew(self, version: str) -> None:
        """New weights: what the old ones computed is dropped."""
        self.version = version
        self.parked.clear()

    def rest(self) -> None:
        """Nobody samples for a while, and others want the memory."""
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.requests.clear()
        self._live.clear()
        self._shifts.clear()
        self.parked.clear()
        self.preempted.clear()

    @torch.inference_mode()
    def step(self, fresh: list[Request]) -> list[Request]:
        """Admit, then draw one token for every row. Returns the rows, finished ones too."""
        self.requests += fresh
        with sampling_mode(self.model):
            self._shrink()
            live = list(self.requests)
            if not live:
                return []
            draw_tokens(torch.cat([self._logits(request) for request in live]), live, self.limit, self.notes)
        self.peak = max(self.peak, self.used)
        for request in [r for r in live if r.stop is not None]:
            self.parked[request.key] = self._live[id(request)]
            self.vacate(request)
        return live

    def _logits(self, request: Request) -> torch.Tensor:
        """[1, vocabulary] after a request's context; what its cache lacks is computed."""
        context = request.context
        held, cache = self._live.get(id(request)) or self._continued(request)
        new = context[len(held) :]
        self.prefill_tokens += len(new) - 1
        out = self.model(
            input_ids=torch.from_numpy(new.astype(np.int64))[None].to(self.device),
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
            return {"position_ids": torch.full((3, 1, len(context) - start), place, device=self.device)}
        ids = torch.from_numpy(context.astype(np.int64)).to(self.device)
        everything = self._reader.inputs(ids, request.images)
        where = positions(self.model, ids, everything, self._reader.token)
        found = self._reader.inputs(ids, request.images, start) if start else everything
        if where is None:
            return found
        self._shifts[id(request)] = int(where.max()) + 1 - len(ids)
        return {**found, "position_ids": where[..., start:]}

    def _continued(self, request: Request) -> Kept:
        """The episode's cache, where the context continues it; else a new one."""
        ids, cache = self.parked.pop(request.key, (np.zeros(0, np.int32), None))
        if cache is not None and len(ids) < request.length and np.array_equal(ids, request.context[: len(ids)]):
            return ids, cache
        from transformers import DynamicCache

        return np.zeros(0, np.int32), DynamicCache(config=self.model.config.get_text_config())

    def _shrink(self) -> None:
        """Give up episodes that wait, then the youngest rows, while the caches take more than they may."""
        while self.parked and self.used > self.memory:
            self.parked.pop(next(iter(self.parked)))
        while len(self.requests) > 1 and self.used > self.memory:
            youngest = max(self.requests, key=lambda r: r.order)
            self.vacate(youngest)
            self.preempted.append(youngest)
            self.preemptions += 1
        if self.used > self.memory and self.requests[0].length > len(self.requests[0].ids):
            raise PolicyError(
                f"An episode of {self.requests[0].length} tokens takes more than the {self.memory} bytes that it may.",
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
