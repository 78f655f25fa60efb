"""The loop that steps an engine for a policy: which requests wait, are admitted or leave.

That is decided in the event loop, between two steps; one worker thread runs the steps and touches the engine only while
the event loop does not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from agentrl_cli.errors import AgentRLError, PolicyError
from agentrl_cli.hooks.waits import advance
from agentrl_cli.inference.engine import PagedEngine
from agentrl_cli.inference.fallback import FallbackEngine
from agentrl_cli.inference.request import Request

Engine = PagedEngine | FallbackEngine
"""The sampling engine of a LocalPolicy. `step` runs in a thread, everything else between two steps."""


class ServingLoop:
    """Steps an engine while there are requests.

    Args:
        version: Returns the version of the weights that a finished turn was sampled with.
    """

    def __init__(self, engine: Engine, version: Callable[[], str]) -> None:
        self._engine, self._version = engine, version
        self._waiting: deque[Request] = deque()
        self._open: set[Request] = set()
        """Those whose result is awaited, wherever they are: a failure reaches each of them."""
        self._released: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self._stepping: Future[list[Request]] | None = None
        """The steps for which the thread has the engine; None if it has not."""
        self._called = False
        """True if the event loop needs the engine: a request came, left or waits."""
        self._held = False
        """True while new weights wait for the running turns: no turn is begun then."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    def add(self, request: Request) -> None:
        """Queue a turn; its future has the result."""
        self._waiting.append(request)
        self._open.add(request)
        request.future.add_done_callback(lambda _: self._open.discard(request))
        self._called = True
        self._wake()

    def release(self, key: str) -> None:
        """Forget an episode's keys and values."""
        self._released.append(key)
        self._called = True
        if self._stepping is None:
            self._tidy()
        self._wake()

    async def close(self) -> None:
        """Cancel what runs, wait for the step in progress, and free everything."""
        self._called = True
        for request in list(self._open):
            if not request.abandoned:
                request.future.cancel()
        if (
            self._task is not None
            and self._running
            and self._task.get_loop() is asyncio.get_running_loop()
        ):
            await asyncio.wait(
                [self._task]
            )  # it ends by itself at the end of its step: no request is left
        self._thread.shutdown(wait=True)
        self._waiting.clear()
        self._engine.clear()

    async def between_turns(self, change: Callable[[], None]) -> None:
        """Run `change` while nothing is computed: running turns finish first, and no turn begins meanwhile."""
        self._held = self._called = True
        try:
            while self._task is not None and self._running:
                await asyncio.wait([self._task])
            change()
        finally:
            self._held = False
            self._wake()

    async def wait_for_step(self) -> None:
        """Return once the step in progress is over."""
        if self._stepping is not None:
            await asyncio.wait([asyncio.wrap_future(self._stepping)])

    # --- all of this runs in the event loop, between two steps of the thread ------------------------------------------

    @property
    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _wake(self) -> None:
        if self._waiting and not self._running and not self._held:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        """Step the batch until no request is left. A failure reaches every waiting episode."""
        try:
            while True:
                self._tidy()
                fresh = self._admit()
                if not fresh and not self._engine.running:
                    return
                for request in await self._step(fresh):
                    request.report(self._version())
                preempted = sorted(self._engine.preempted, key=lambda request: -request.order)
                self._waiting.extendleft(preempted)  # before the others, the oldest first
                self._engine.preempted.clear()
                # Let the coroutines that were waiting go on: their next turns then join the same step.
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - handed to every waiting episode, none may hang
            self._fail(error)

    async def _step(self, fresh: list[Request]) -> list[Request]:
        """Steps in the thread, which has the batch to itself meanwhile."""
        self._called = False
        step = self._stepping = self._thread.submit(self._steps, fresh)
        try:
            return await asyncio.wrap_future(step)
        finally:
            wait(
                [step]
            )  # if this was cancelled: the thread leaves the batch before anything else touches it
            self._stepping = None

    def _steps(self, fresh: list[Request]) -> list[Request]:
        """In the thread: steps until there is something to report to the event loop, or it calls. Returns the rows."""
        while True:
            rows = self._engine.step(fresh)
            advance(len(rows))
            quiet = not self._called and not self._engine.preempted
            if not (
                rows
                and quiet
                and all(r.stop is None and r.on_token is None and not r.abandoned for r in rows)
            ):
                return rows
            fresh = []

    def _fail(self, error: Exception) -> None:
        memory = "out of memory" in str(error).lower()
        hint = (
            "Lower rollout.concurrency or rollout.max_tokens."
            if memory
            else getattr(error, "hint", "")
        )
        what = (
            error.message if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"
        )
        for request in list(self._open):
            problem = PolicyError(f"The model could not generate: {what}", hint=hint)
            problem.__cause__ = error
            request.fail(problem)
        self._waiting.clear()
        self._engine.clear()

    def _tidy(self) -> None:
        """Remove abandoned requests from the batch, and released ones from the cache."""
        for request in list(self._engine.running):
            if request.abandoned:
                self._engine.remove(request)
        for key in self._released:
            self._engine.forget(key)
        self._released.clear()

    def _admit(self) -> list[Request]:
        """Take as many waiting requests as there is room for. Reading the front costs nothing for those behind."""
        waiting, passed = self._waiting, []
        while waiting and waiting[0].abandoned:
            waiting.popleft()
        # A turn that has begun ends with the weights it began with.
        ready = (r for r in waiting if not r.abandoned and (r.out or not self._held))
        taken = self._engine.admit(ready)
        left = set(map(id, taken))
        while left:
            request = waiting.popleft()
            if id(request) in left:
                left.remove(id(request))
            elif not request.abandoned:
                passed.append(request)
        waiting.extendleft(reversed(passed))
        return taken
