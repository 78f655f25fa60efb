"""A worker as the process of the run sees it: the protocol over a link, with the episodes that arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from agentrl_cli import errors
from agentrl_cli.cluster.protocol import (
    Finished,
    Hello,
    Link,
    Message,
    Order,
    Setup,
    Status,
    Weights,
    WorkerLost,
)
from agentrl_cli.cluster.relay import Delivery
from agentrl_cli.errors import AgentRLError, RunFailed
from agentrl_cli.rollout.recorder import Recorder

STARTING = 3600.0
"""Seconds that a worker may take to start and to load its model. One that ends is noticed at once."""
STOPPING = 10.0
"""Seconds that cancelled episodes and a closing worker may take."""


@dataclass(eq=False)
class Running:
    """An order that was sent, and what has arrived of it."""

    order: Order
    delivery: Delivery
    done: asyncio.Future[Finished]
    missed: int = 0
    """Signs of life since it was sent in which the worker did not name it."""


@dataclass(slots=True)
class Seen:
    """What is known of a worker, for people."""

    status: Status = field(default_factory=Status)
    at: float = 0.0
    rate: float = 0.0
    """Sampled tokens a second, lately."""
    error: str = ""
    lost: int = 0
    """How often it was lost."""
    finished: int = 0
    tokens: int = 0
    """Tokens that all processes of this worker sampled."""


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
        """`discard` deletes an episode that was begun and lost."""
        self.number = number
        self.setup = setup
        self.recorder = recorder
        self.discard = discard
        self.running: dict[int, Running] = {}
        self.seen = Seen()
        self.hello: Hello | None = None
        """None until it has started."""
        self.ready = False
        """Whether it takes orders; its owner sets it, once the weights are loaded."""
        self.metrics: list[dict[str, float]] = []
        """Metrics of its policy that were not taken yet."""
        self.lost: asyncio.Future[WorkerLost] | None = None
        self._link = link
        self._open: Link | None = None
        self._closing = False
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[str, asyncio.Future[Message]] = {}

    async def open(self) -> Hello:
        """Start it. Raises WorkerLost, or the AgentRLError with which it refused."""
        self._open, self.lost = self._link(), asyncio.get_running_loop().create_future()
        self.hello = None
        try:
            async with asyncio.timeout(STARTING):
                await self._open.open()
                self._reader = asyncio.ensure_future(self._read(self._open))
                hello: Hello
                (hello,) = await self._ask("ready", ("open", self.setup))
        except TimeoutError:
            await self._lose(f"it did not start within {STARTING:g} s")
            raise WorkerLost(f"Worker {self.number} did not start within {STARTING:g} s.") from None
        except BaseException as error:
            await self._lose(str(error) or type(error).__name__)
            raise
        self.hello, self.seen.at, self.seen.status = hello, time.monotonic(), Status()
        return hello

    async def load(self, version: str, weights: Weights) -> None:
        """As in Worker; returns once the worker has them."""
        _, error = await self._ask("loaded", ("load", version, weights))
        if error:
            await self._lose(f"it could not load {version}: {error}")
            raise WorkerLost(f"Worker {self.number} could not load the weights {version}: {error}")

    async def hold(self) -> None:
        """Let no turn begin until the next `load`; returns once none runs. Raises WorkerLost."""
        await self._ask("held", ("hold",))

    async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Finished, None]:
        """As in Worker. The caller that stops listening cancels what is left."""
        loop = asyncio.get_running_loop()
        new = [Running(order, Delivery(self.recorder), loop.create_future()) for order in orders]
        self.running |= {one.order.number: one for one in new}
        try:
            for one in new:
                await self._send(("run", one.order))
            for done in asyncio.as_completed([one.done for one in new]):
                yield await done
        finally:
            left = [one for one in new if not one.done.done()]
            if left:
                await self.cancel([one.order.number for one in left])
            for one in new:
                self.running.pop(one.order.number, None)
                if one.delivery.episode_id:
                    self.discard(one.delivery.episode_id)
                if one.done.done() and not one.done.cancelled():
                    one.done.exception()  # read, so that it is not reported as never retrieved

    async def cancel(self, numbers: Sequence[int]) -> None:
        """As in Worker; waits a moment for the episodes to end as cancelled."""
        waiting = [self.running[number].done for number in numbers if number in self.running]
        with contextlib.suppress(WorkerLost):
            for number in numbers:
                await self._send(("cancel", number))
        if waiting and self.ready:
            await asyncio.wait(waiting, timeout=STOPPING)

    async def echo(self) -> tuple[float, float]:
        """(seconds that a message took there and back, seconds by which its clock is ahead). Raises WorkerLost."""
        sent = time.time()
        _, there = await self._ask("echo", ("echo", sent))
        back = time.time()
        return back - sent, there - (sent + back) / 2

    async def close(self) -> None:
        """Let it end by itself, then make sure."""
        self.ready, self._closing = False, True
        with contextlib.suppress(WorkerLost):
            await self._send(("close",))
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=STOPPING)
        await self._lose("closed")

    # --- messages ----------------------------------------------------------------------------------------------------

    async def _send(self, message: Message) -> None:
        if self._open is None:
            raise WorkerLost(f"Worker {self.number} is not there.")
        try:
            await self._open.send(message)
        except WorkerLost as error:
            await self._lose(error.message)
            raise

    async def _ask(self, answer: str, message: Message) -> Message:
        """Send a message and wait for its answer, without its name."""
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        # Read even if `_send` fails first, so that it is not reported as never retrieved.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._answers[answer] = future
        await self._send(message)
        return await future

    async def _read(self, link: Link) -> None:
        patience = self.setup.config.cluster.patience
        try:
            while True:
                async with asyncio.timeout(patience if self.hello is not None else STARTING):
                    messages = await link.receive()
                for message in messages:
                    self._take(message)
        except WorkerLost as error:
            await self._lose(error.message)
        except TimeoutError:
            await self._lose(f"no sign of life for {patience:g} s")
        except Exception as error:  # noqa: BLE001 - an answer that cannot be read is a lost worker, not a lost run
            await self._lose(f"{type(error).__name__}: {error}")

    def _take(self, message: Message) -> None:
        name, *values = message
        if name in self._answers and name in ("ready", "loaded", "held", "echo"):
            self._answer(name, tuple(values))
        elif name == "refused":
            self._answer(
                "ready", error_of(values[0], f"Worker {self.number}: {values[1]}", values[2])
            )
        elif name == "beat":
            self._beat(values[0])
        elif (one := self.running.get(values[0])) is None or one.done.done():
            return  # of an order that is not wanted any more
        elif name == "end":
            one.done.set_result(Finished(values[0], one.delivery.attempted(*values[1:])))
        elif name == "failed":
            one.done.set_exception(error_of(*values[1:]))
        else:
            one.delivery.take(message)

    def _answer(self, name: str, answer: Message | BaseException) -> None:
        future = self._answers.pop(name, None)
        if future is None or future.done():
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _beat(self, status: Status) -> None:
        now, seen = time.monotonic(), self.seen
        rate = max(status.tokens - seen.status.tokens, 0) / max(now - seen.at, 1e-3)
        seen.finished += max(status.finished - seen.status.finished, 0)
        seen.tokens += max(status.tokens - seen.status.tokens, 0)
        seen.rate = rate if not seen.rate else 0.7 * seen.rate + 0.3 * rate
        seen.status, seen.at = status, now
        if status.metrics:
            self.metrics.append(status.metrics)
        for number, one in self.running.items():
            one.missed = 0 if number in status.running else one.missed + 1
            if one.missed > 3 and not one.done.done():  # it or its answer was lost on the way
                one.done.set_exception(
                    WorkerLost(f"Worker {self.number} does not know order {number}.")
                )

    async def _lose(self, reason: str) -> None:
        """The worker is of no use any more: end it, and hand the error to everything that waits for it."""
        link, self._open = self._open, None
        if link is None:
            return
        self.ready = False
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        last = await link.kill()
        text = f"{reason}{f'; it wrote: {last}' if last else ''}"
        error = WorkerLost(f"Worker {self.number} was lost: {text}.")
        for one in self.running.values():
            if not one.done.done():
                one.done.set_exception(error)
        for name in list(self._answers):
            self._answer(name, error)
        if not self._closing:
            self.seen.error, self.seen.lost = text, self.seen.lost + 1
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(error)


def error_of(name: str, message: str, hint: str) -> BaseException:
    """Return the error of a worker, of the same class."""
    if name == "CancelledError":
        return asyncio.CancelledError()
    kind = getattr(errors, name, RunFailed)
    made: AgentRLError = kind(message, hint=hint)
    return made
