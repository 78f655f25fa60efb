"""The paged engine: admits requests, computes prompts, and draws a token for every running request in each step.

A request is admitted with the keys and values of all its context but the last token; that one is fed by the decode step
that draws its first token. What several new prompts have in common is computed once, before them.

A request is admitted where blocks are free, or held by entries that can be computed again: prefixes and finished turns.
Where the running requests outgrow the rest, the youngest is preempted: it releases its blocks, waits again, and is
computed again from its tokens, which stay. The oldest is never disturbed, so one of them always gets on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from agentrl_cli.errors import PolicyError
from agentrl_cli.inference.attention import make_change_error
from agentrl_cli.inference.drafts import Drafts
from agentrl_cli.inference.kv_cache import (
    BLOCK,
    BlockPool,
    FixedKVCache,
    KVCache,
    NotServed,
    blocks,
    common,
)
from agentrl_cli.inference.model_runner import PIECE, ModelRunner
from agentrl_cli.inference.request import Request, TokenSequence
from agentrl_cli.inference.sampler import sample
from agentrl_cli.models.adapter import eval_mode, transformer
from agentrl_cli.types import Int32

Item = tuple[Int32, int, list[int]]
"""New tokens of a sequence, the position of the first, and its block table."""


class Scheduler:
    """Running requests over a KV cache of `budget` blocks.

    Args:
        rows: Most running requests.
        budget: Blocks that the cache may take.
    """

    def __init__(self, cache: KVCache, rows: int, budget: int) -> None:
        self.cache = cache
        self.rows = rows
        self.budget = budget
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        """Those that wait again; the policy takes them back."""
        self.preemptions = 0

    # --- between two steps, in the event loop -------------------------------------------------------------------------

    def admit(self, waiting: Iterable[Request]) -> list[Request]:
        """Return the first of the waiting requests for which there is room, in order."""
        taken: list[Request] = []
        if len(self.running) >= self.rows:
            return taken
        held = {block for request in self.running for block in request.block_table}
        prompts: set[bytes] = set()
        need = 0
        for request in waiting:
            if len(self.running) + len(taken) >= self.rows:
                break
            need += self._count_blocks(request, held, prompts)
            if len(held) + need > self.budget and (self.running or taken):
                break
            taken.append(request)
        return taken

    def _count_blocks(self, request: Request, held: set[int], prompts: set[bytes]) -> int:
        """Return the blocks for a context and some of the tokens to come, beside those that others hold."""
        context = request.context
        more = min(
            request.sampling.max_new_tokens - len(request.out), max(BLOCK, len(context) // 2)
        )
        start, source = self.cache.longest(context, request.key)
        shared = 0 if source is None else start // BLOCK
        if source is not None:
            held.update(source.blocks[:shared])
        if context.tobytes() in prompts:  # another one brings it
            shared = (len(context) - 1) // BLOCK
        prompts.add(context.tobytes())
        return max(blocks(len(context) + more) - shared, 0)

    def remove(self, request: Request) -> None:
        """Take a request out and release its blocks."""
        self.running.remove(request)
        self.cache.free(request)

    def forget(self, key: str) -> None:
        """An episode is over: release what its last turn left."""
        self.cache.forget(key)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> int | None:
        """Start a request. Returns how much of its context is cached; None if it waits again, as memory is short."""
        start = self.cache.begin(request)
        if start is not None:
            self.running.append(request)
        elif self.running:
            self.preempted.append(request)
        else:
            raise PolicyError(
                "No memory is left for keys and values.",
                hint="Raise rollout.memory, or lower concurrency.",
            )
        return start

    def reserve(self) -> None:
        """A block for the newest token of each running request, the oldest first; the youngest are preempted for it."""
        short = [r for r in self.running if len(r.block_table) * BLOCK < r.length]
        for request in sorted(short, key=lambda r: r.order):
            while request in self.running and not self.cache.reserve(request):
                self._preempt(max(self.running, key=lambda r: r.order))

    def _preempt(self, request: Request) -> None:
        self.remove(request)
        self.preempted.append(request)
        self.preemptions += 1

    def finish(self, request: Request) -> None:
        """A turn is over: its blocks stay for the next turn of its episode."""
        self.running.remove(request)
        self.cache.keep(request)

    def clear(self) -> None:
        """Forget everything."""
        self.running.clear()
        self.preempted.clear()


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
