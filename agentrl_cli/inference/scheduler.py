"""Which requests run: admission by free blocks, and preemption of the youngest.

A request is admitted where blocks are free, or held by what can be computed again: prefixes and finished turns. Where
the running requests outgrow the rest, the youngest is preempted: it releases its blocks, waits again, and is computed
again from its tokens, which stay. The oldest is never disturbed, so one of them always gets on.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentrl_cli.errors import PolicyError
from agentrl_cli.inference.kv_cache import BLOCK, KVCache, blocks
from agentrl_cli.inference.request import Request


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
        short = [request for request in self.running if self.cache.lacks(request)]
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
