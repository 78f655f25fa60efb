"""The paged engine: admits requests, computes prompts, and draws a token for every running request in each step.

A request is admitted with the keys and values of all its context but the last token; that one is fed by the decode step
that draws its first token. What several new prompts have in common is computed once, before them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from agentrl_cli.inference.attention_hook import make_change_error
from agentrl_cli.inference.drafts import Drafts
from agentrl_cli.inference.kv_cache import (
    BLOCK,
    BlockPool,
    FixedKVCache,
    KVCache,
    NotServed,
    common,
)
from agentrl_cli.inference.model_runner import PIECE, ModelRunner
from agentrl_cli.inference.request import Request, TokenSequence
from agentrl_cli.inference.sampler import sample
from agentrl_cli.inference.scheduler import Scheduler
from agentrl_cli.models.adapter import eval_mode, transformer
from agentrl_cli.types import Int32

Item = tuple[Int32, int, list[int]]
"""New tokens of a sequence, the position of the first, and its block table."""


class PagedEngine(Scheduler):
    """Continuous batching over a paged KV cache.

    Args:
        limit: Most positions of a sequence.
        rows: Most running requests.
        budget: Blocks that keys and values may take.
    """

    name = "paged"

    def __init__(self, runner: ModelRunner, *, limit: int, rows: int, budget: int) -> None:
        self.runner = runner
        self.vocabulary, self.limit = runner.vocabulary, min(limit, budget * BLOCK)
        self.pool = BlockPool(runner.layers, budget, scratch=runner.records)
        super().__init__(self._make_cache(rows), rows, budget)
        self.drafts = Drafts() if runner.drafts else None

    def _make_cache(self, rows: int) -> KVCache:
        return KVCache(self.pool)

    @property
    def why(self) -> str:
        """Why no faster way is taken; empty for the fastest."""
        return self.runner.why

    @property
    def records(self) -> bool:
        """Whether decode steps are captured."""
        return self.runner.records

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        """Memory in use, its peak, preemptions and prompt tokens computed; `reset`: count from here on."""
        found = {
            "rollout/kv_blocks": float(self.cache.used),
            "rollout/kv_blocks_peak": float(self.cache.peak),
            "rollout/preemptions": float(self.preemptions),
            "rollout/prefill_tokens": float(self.runner.prefilled),
        }
        if reset:
            self.cache.peak = self.preemptions = self.runner.prefilled = 0
        return found

    # --- between two steps -------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """The weights are others: drop the results of the old ones."""
        self.cache.drop_cached()
        self.runner.weights.renew()

    def rest(self) -> None:
        """Give memory back while nothing is sampled."""
        if self.runner.records:  # graphs read the pool where it was captured
            self.cache.drop_cached()
        else:
            self.clear()
            self.runner.weights.free()

    def clear(self) -> None:
        super().clear()
        self.cache.clear()
        self.runner.forget_tables()

    # --- a step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, fresh: list[Request]) -> list[Request]:
        """Begin some requests, then draw one token for every running one; returns those."""
        try:
            with eval_mode(self.runner.model):
                self.runner.refresh()
                self._begin(fresh)
                self.reserve()
                live = list(self.running)
                if live:
                    self._draw(live)
        except NotServed as error:
            raise make_change_error(transformer(self.runner.model)) from error
        for request in live:
            if request.stop is not None:
                if self.drafts is not None:
                    self.drafts.learn(request.context, len(request.ids))
                self.finish(request)
        return live

    def _draw(self, live: list[Request]) -> None:
        """Draw a token for each request, and those behind it that its draft had right."""
        known, rows = self.drafts, len(live)
        if known is None or not self.runner.drafts or not known.worth(rows):
            sample(self._decode(live), live, self.limit)
            drawn = rows
        else:
            before = [len(request.out) for request in live]
            drafts = [known.propose(request, self._room(request), rows) for request in live]
            given = [[token for token, _ in draft] for draft in drafts] if any(drafts) else ()
            sample(self.runner.decode(self.pool, live, given), live, self.limit, drafts=given)
            counts = [len(request.out) - n for request, n in zip(live, before, strict=True)]
            for request, draft, count in zip(live, drafts, counts, strict=True):
                if draft:
                    known.report(request, draft, count)
            drawn = sum(counts)
        if known is not None:
            known.rest(drawn)

    def _room(self, request: Request) -> int:
        """Return how many drafted tokens may stand behind a request's newest one: in its last block, in its turn."""
        in_block = len(request.block_table) * BLOCK - request.length
        left = min(request.sampling.max_new_tokens - len(request.out), self.limit - request.length)
        return min(in_block, left - 1)

    def _decode(self, live: list[Request]) -> Tensor:
        """Logits [rows, vocabulary] after each request's newest token."""
        return self.runner.decode(self.pool, live)

    def _begin(self, fresh: list[Request]) -> None:
        """Block tables for new requests, and the keys and values of their contexts."""
        self._add_prefixes([r for r in fresh if r.key not in self.cache.turns])
        begun = [(request, self.begin(request)) for request in fresh]
        if self.drafts is not None:
            for request, start in begun:
                if start is not None:
                    self.drafts.learn(request.context, start)
        self._prefill(
            [
                (r.context[start:-1], start, r.block_table)
                for r, start in begun
                if start is not None and r.block_table
            ]
        )
        self.cache.trim()

    def _add_prefixes(self, fresh: list[Request]) -> None:
        """Compute once, and keep, what new prompts have in common: system prompt and tools, and a group's prompt."""
        prompts: dict[bytes, Int32] = {}
        several: dict[bytes, Int32] = {}
        for request in fresh:
            context = request.context
            (several if context.tobytes() in prompts else prompts)[context.tobytes()] = context
        if len(prompts) > 1:
            ordered = sorted(prompts.values(), key=lambda ids: ids.tolist())
            self._add(ordered[0][: common(ordered[0], ordered[-1])])
        for ids in several.values():
            self._add(ids[:-1])

    def _add(self, ids: Int32) -> None:
        """Compute a prefix, now: the next one may begin with it."""
        added = self.cache.add_prefix(ids)
        if added is not None:
            prefix, start = added
            if self.drafts is not None:
                self.drafts.learn(ids, start)
            self._prefill([(ids[start:], start, prefix.blocks)])

    def _prefill(self, items: list[Item]) -> None:
        """Compute new tokens of some sequences, of like lengths together, as many as one forward may hold."""
        batch: list[Item] = []
        for item in sorted((item for item in items if len(item[0])), key=lambda item: len(item[0])):
            width = min(len(item[0]), PIECE)
            if batch and (len(batch) + 1) * width > self.runner.most:
                self.runner.prefill(self.pool, *zip(*batch, strict=True))
                batch = []
            batch.append(item)
        if batch:
            self.runner.prefill(self.pool, *zip(*batch, strict=True))


class FixedEngine(PagedEngine):
    """Fixed slots, for `deterministic`: every shape is the same whatever else runs, and prompts are computed alone.

    An episode has a slot until it is forgotten, so its numbers depend on itself and its slot alone. `limit` is the
    length of every slot.
    """

    cache: FixedKVCache

    def __init__(self, runner: ModelRunner, *, limit: int, rows: int, budget: int) -> None:
        super().__init__(runner, limit=limit, rows=rows, budget=budget)
        self._slots: dict[str, int] = {}

    def _make_cache(self, rows: int) -> KVCache:
        return FixedKVCache(self.pool, rows, self.limit)

    def admit(self, waiting: Iterable[Request]) -> list[Request]:
        return [request for request in waiting if self._claim(request)]

    def _claim(self, request: Request) -> bool:
        """Give an episode its slot; False if it waits for one.

        The arithmetic of a row may depend on where it stands, so a request that names a slot waits for just that one.
        """
        if request.key not in self._slots:
            taken = set(self._slots.values())
            named = request.sampling.slot
            wanted = range(self.rows) if named < 0 else [named % self.rows]
            free = next((slot for slot in wanted if slot not in taken), None)
            if free is None:
                return False
            self._slots[request.key] = free
        request.slot = self._slots[request.key]
        return True

    def forget(self, key: str) -> None:
        super().forget(key)
        self._slots.pop(key, None)

    def clear(self) -> None:
        super().clear()
        self._slots.clear()

    def _decode(self, live: list[Request]) -> Tensor:
        rows: list[TokenSequence] = self.cache.idle([request.key for request in self.running])
        for request in live:
            rows[request.slot] = request
        return self.runner.decode(self.pool, rows)[[request.slot for request in live]]

    def _add_prefixes(self, fresh: list[Request]) -> None:
        """Nothing is shared."""

    def _prefill(self, items: list[Item]) -> None:
        for tokens, start, table in items:
            if len(tokens):
                self.runner.prefill(self.pool, [tokens], [start], [table])
