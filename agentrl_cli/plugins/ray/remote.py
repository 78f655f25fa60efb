"""A worker as the process of the run sees it: calls over a link, and the episodes that arrive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentrl_cli.errors import AgentRLError, RunFailed
from agentrl_cli.hooks.threads import OwnTime
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.plugins.ray.service import Call, Delivery, Hello, Message, Setup, Weights
from agentrl_cli.plugins.ray.settings import ClusterConfig
from agentrl_cli.rollout.context import Attempted, RolloutContext
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.recorder import Recorder
from agentrl_cli.store.rows import WorkerRow

STARTING = 3600.0
"""Seconds that a worker may take to start and to load its model. One that ends is noticed at once."""
STOPPING = 10.0
"""Seconds that cancelled episodes and a closing worker may take."""
MISSED = 3
"""Signs of life in which a worker may leave out a call that it was sent."""


class WorkerLost(RunFailed):
    """A worker died, hangs, or cannot be reached."""


class Link(Protocol):
    """Carries messages to one worker and back, in order. Every method but `kill` raises WorkerLost."""

    async def open(self, setup: Setup) -> None:
        """Start the worker: a process or an actor that runs a `Service`."""

    async def send(self, call: Call) -> None:
        """Send a call."""

    async def receive(self) -> Sequence[Message]:
        """Return the next messages, at least one."""

    async def kill(self) -> str:
        """End the worker at once. Returns the last line that it wrote, for people."""


@dataclass(eq=False)
class Pending:
    """A call that has no answer yet."""

    answer: asyncio.Future[Any]
    delivery: Delivery | None = None
    missed: int = 0
    """Signs of life since it was sent that do not name it."""


class RemoteWorker:
    """One worker; after `open` again once it was lost, a fresh one in its place."""

    def __init__(
        self,
        number: int,
        link: Callable[[], Link],
        setup: Setup,
        recorder: Recorder | None = None,
        discard: Callable[[str], None] = lambda episode_id: None,
    ) -> None:
        """`discard` deletes an episode that was lost, or whose answer was."""
        self.number, self.setup = number, setup
        self.recorder, self.discard = recorder, discard
        self.make_link = link
        self.hello: Hello | None = None
        """None until it has started."""
        self.ready = False
        """Whether it takes jobs; its owner sets it, once the weights are loaded."""
        self.row = WorkerRow("", number, "", "", 0, "", "", 0, 0, 0, 0.0, 0, "", 0.0)
        """Its state for the screens; episodes and tokens are those of all processes that were this worker."""
        self.jobs: list[Job] = []
        """The jobs that it has."""
        self.metrics: dict[str, float] = {}
        """Metrics of its policy that were not taken yet."""
        self.lost: asyncio.Future[WorkerLost] | None = None
        self._link: Link | None = None
        self._seen = (0.0, 0)
        """When it gave the last sign of life, and its tokens then."""
        self._closing = False
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._pending: dict[int, Pending] = {}

    async def open(self) -> Hello:
        """Start it. Raises WorkerLost, or the AgentRLError with which it refused."""
        self._link = link = self.make_link()
        self.lost, self.hello = asyncio.get_running_loop().create_future(), None
        try:
            async with asyncio.timeout(STARTING):
                await link.open(self.setup)
                self._reader = asyncio.ensure_future(self._read(link))
                hello: Hello = await self.call("hello")
        except BaseException as error:
            late = isinstance(error, TimeoutError)
            reason = f"it did not start within {STARTING:g} s" if late else str(error)
            await self._lose(reason or type(error).__name__)
            if late:
                raise WorkerLost(f"Worker {self.number}: {reason}.") from error
            if isinstance(error, AgentRLError) and not isinstance(error, WorkerLost):
                text = f"Worker {self.number}: {error.message}"
                raise type(error)(text, hint=error.hint) from error
            raise
        self.hello, self._seen = hello, (time.monotonic(), self.row.tokens)
        self.row = replace(self.row, node=hello.node, pid=hello.pid, version="")
        return hello

    async def load(self, version: str, weights: Weights) -> None:
        """Sample with other weights from the next turn on; return once the worker has them. Raises WorkerLost."""
        try:
            await self.call("load", version, weights)
            self.row = replace(self.row, version=version)
        except WorkerLost:
            raise
        except AgentRLError as error:
            reason = f"could not load the weights {version}: {error.message}"
            await self._lose(f"it {reason}")
            raise WorkerLost(f"Worker {self.number} {reason}") from error

    async def attempt(self, job: Job, context: RolloutContext) -> Attempted:
        """Return a job's episode, recorded. Raises WorkerLost, and the errors of an attempt.

        A caller that is cancelled waits a moment for the episode to end as cancelled.
        """
        shaped = any(isinstance(hook, Shaping) for hook in context.hooks.hooks)
        variant = {name: getattr(context, name) for name in ("temperature", "with_tools", "run")}
        delivery = Delivery(self.recorder)
        self.jobs.append(job)
        try:
            answer = await self.call("attempt", job, shaped, variant, delivery=delivery)
        except WorkerLost:
            if (
                delivery.ended is not None
            ):  # the job is given again: kept, its episode would be there twice
                self.discard(delivery.ended.id)
            raise
        finally:
            self.jobs.remove(job)
            if delivery.episode_id:
                self.discard(delivery.episode_id)
        assert delivery.ended is not None
        finished, tokens = self.row.finished + 1, delivery.ended.trained_tokens
        self.row = replace(self.row, finished=finished, tokens=self.row.tokens + tokens)
        return Attempted(delivery.ended, *answer)

    async def close(self) -> None:
        """Let it end by itself, then make sure."""
        self.ready, self._closing = False, True
        with contextlib.suppress(WorkerLost):
            await self._send((0, "close", ()))
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=STOPPING)
        await self._lose("closed")

    # --- messages ----------------------------------------------------------------------------------------------------

    async def call(self, method: str, *arguments: Any, delivery: Delivery | None = None) -> Any:
        """Return the answer of a method of `Service`; `delivery` takes its records.

        Raises WorkerLost, and the error of the call.

        A caller that is cancelled waits a moment for the call to end as cancelled.
        """
        answer, number = asyncio.get_running_loop().create_future(), next(self._numbers)
        # Read even if the caller has stopped waiting, so that it is not reported as never retrieved.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._pending[number] = Pending(answer, delivery)
        try:
            await self._send((number, method, arguments))
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerLost):
                await self._send((number, "cancel", ()))
            if self.ready:
                await asyncio.wait([answer], timeout=STOPPING)
            raise
        finally:
            del self._pending[number]
        return answer.result()

    async def _send(self, call: Call) -> None:
        if self._link is None:
            raise WorkerLost(f"Worker {self.number} is not there.")
        try:
            await self._link.send(call)
        except WorkerLost as error:
            await self._lose(error.message)
            raise

    async def _read(self, link: Link) -> None:
        patience = self.setup.config.section(ClusterConfig).patience
        try:
            while True:
                async with OwnTime(patience if self.hello is not None else STARTING):
                    messages = await link.receive()
                for message in messages:
                    self._take(*message)
        except WorkerLost as error:
            await self._lose(error.message)
        except TimeoutError:
            await self._lose(f"no sign of life for {patience:g} s")
        except Exception as error:  # noqa: BLE001 - an answer that cannot be read is a lost worker, not a lost run
            await self._lose(f"{type(error).__name__}: {error}")

    def _take(self, number: int, name: str, value: Any) -> None:
        call = self._pending.get(number)
        if name == "beat":
            self._beat(*value)
        elif call is None or call.answer.done():
            return  # of a call whose answer is not wanted any more
        elif name == "done":
            call.answer.set_result(value)
        elif name == "failed":
            # As the worker ends; a caller that cancelled the call itself does not read it.
            if isinstance(value, asyncio.CancelledError):
                value = WorkerLost(f"Worker {self.number} ended during the call.")
            call.answer.set_exception(value)
        elif call.delivery is not None:
            call.delivery.take(name, *value)

    def _beat(self, running: Sequence[int], metrics: Mapping[str, float]) -> None:
        (seen, tokens), self._seen = self._seen, (time.monotonic(), self.row.tokens)
        rate, old = (self.row.tokens - tokens) / max(self._seen[0] - seen, 1e-3), self.row.rate
        self.row = replace(self.row, rate=0.7 * old + 0.3 * rate if old else rate)
        for name, value in metrics.items():
            self.metrics[name] = merge(name, self.metrics.get(name), value)
        for number, call in self._pending.items():
            call.missed = 0 if number in running else call.missed + 1
            if call.missed > MISSED and not call.answer.done():  # it or its answer was lost
                text = f"Worker {self.number} does not know call {number}."
                call.answer.set_exception(WorkerLost(text))

    async def _lose(self, reason: str) -> None:
        """End a worker that is of no use any more, and hand the error to everything that waits for it."""
        link, self._link = self._link, None
        if link is None:
            return
        self.ready = False
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        last = await link.kill()
        text = f"{reason}{f'; it wrote: {last}' if last else ''}"
        error = WorkerLost(f"Worker {self.number} was lost: {text}.")
        for call in self._pending.values():
            if not call.answer.done():
                call.answer.set_exception(error)
        if not self._closing:
            self.row = replace(self.row, error=text, lost=self.row.lost + 1)
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(error)


SERVERS = "remote/servers"
"""The metric that counts servers, which all workers share."""


def merge(name: str, old: float | None, new: float) -> float:
    """Return a worker's metric of two statuses: the larger peak, the later level, or the sum."""
    if old is None:
        return new
    if name.endswith("peak"):
        return max(old, new)
    return new if name == SERVERS or name.startswith("rollout/kv") else old + new
