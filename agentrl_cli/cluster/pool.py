"""The workers of a run: gives out jobs, again when a worker is lost, brings weights, replaces workers.

The only writer to the store is this process: what a worker records arrives as messages. A job's seeds are in the job,
so it does not matter which worker makes it. A worker that is lost costs the turns that it was making: its jobs are
given again with the same seeds, at most twice, then the episode is an `env_error`; a fresh worker takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.cluster.checks import require_local, require_same
from agentrl_cli.cluster.policy import ClusterPolicy
from agentrl_cli.cluster.protocol import Order, Save, Setup, Variant, Weights, WorkerLost
from agentrl_cli.cluster.remote import RemoteWorker
from agentrl_cli.cluster.service import Following
from agentrl_cli.config import Config
from agentrl_cli.errors import AgentRLError, BadAnswer, ConfigError, PolicyError, RunFailed
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.policies.protocols import Policy, TrainablePolicy
from agentrl_cli.registry import resolve
from agentrl_cli.rollout.attempt import new_episode
from agentrl_cli.rollout.context import Attempted, RolloutContext
from agentrl_cli.rollout.flags import flag_names
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.recorder import StoreRecorder
from agentrl_cli.store.rows import WorkerRow
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Outcome

if TYPE_CHECKING:
    from torch import nn

    from agentrl_cli.policies.load import Loaded
    from agentrl_cli.store import Store

AGAIN = 2
"""How often a job is given again after a lost worker."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a lost worker is replaced, doubled after each failure."""
ALL_LOST = 600.0
"""Seconds after which a run without any worker fails."""
SHOWN = 2.0
"""Seconds between two looks of the screens at the workers."""

_LOG = logging.getLogger(__name__)

SERVERS = "remote/servers"
LINKS = {
    "processes": "agentrl_cli.cluster.processes:open_links",
    "ray": "agentrl_cli.cluster.ray_actors:open_links",
}
"""Kind of worker to what opens the links to all of them."""


class WorkerPool:
    """N workers. Use `open_pool`."""

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        config: Config,
        store: Store | None,
        save: Save | None = None,
    ) -> None:
        """`save` makes the trained weights of a model what workers can load."""
        self.workers = workers
        self.count = len(workers)
        self.config = config
        self.store = store
        self.version = ""
        self.weights: Weights = None
        self._save = save
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._run_id: str | None = None
        self._alone_since = time.monotonic()
        self._closed = False
        self._reserved: set[RemoteWorker] = set()
        """Workers that make one job alone."""

    # --- opened and closed -------------------------------------------------------------------------------------------

    async def open(self, version: str) -> None:
        """Start all workers, with weights that are called `version`. Raises the first one's refusal."""
        self.version = version
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(self._admit(worker))
        except BaseExceptionGroup as problems:
            raise problems.exceptions[0] from problems
        self._tasks = [asyncio.ensure_future(self._replace(worker)) for worker in self.workers]
        self._tasks.append(asyncio.ensure_future(self._show()))

    async def close(self) -> None:
        """End all workers."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self.workers), return_exceptions=True)
        self._write_rows()

    # --- episodes ----------------------------------------------------------------------------------------------------

    async def attempt(self, job: Job, context: RolloutContext) -> Attempted:
        """As in Workers."""
        self._run_id = context.run.id if context.run is not None else None
        lost: list[WorkerLost] = []
        failed: PolicyError | None = None
        while len(lost) <= AGAIN:
            last = len(lost) == AGAIN
            worker = await (self._idle_worker(job) if last else self._free_worker(job))
            try:
                return await self.attempt_by(worker, job, context)
            except WorkerLost as error:
                lost.append(error)
            except BadAnswer:
                raise
            except PolicyError as error:  # its machine may be the cause, and another one may do it
                failed = error
                lost.append(WorkerLost(error.message))
            finally:
                if last:
                    self._reserved.discard(worker)
                self._wake()
        if failed is not None:
            raise failed
        return self._give_up(job, lost[-1], context)

    async def attempt_by(
        self, worker: RemoteWorker, job: Job, context: RolloutContext
    ) -> Attempted:
        """Return a job's episode by a certain worker. Raises WorkerLost, and what an attempt raises."""
        shaped = any(isinstance(hook, Shaping) for hook in context.hooks.hooks)
        variant = Variant(context.temperature, context.with_tools, shaped, context.run)
        order = Order(next(self._numbers), job, variant, self.version)
        async with contextlib.aclosing(worker.run([order])) as ended:
            return (await anext(ended)).attempted

    def _give_up(self, job: Job, error: WorkerLost, context: RolloutContext) -> Attempted:
        """Return the episode of a job that was lost each time."""
        recorder = context.recorder
        begun = new_episode(job, self.version)
        text = f"The worker was lost {AGAIN + 1} times. {error.message}"
        ended = begun.with_(outcome=Outcome.ENV_ERROR, error=text, ended=time.time())
        ended = ended.with_(flags=flag_names(ended, []))
        if recorder is not None:
            recorder.start(begun, job.task.split, context.chat.tokenizer.hash)
            recorder.finish(ended)
        return Attempted(ended)

    async def _free_worker(self, job: Job) -> RemoteWorker:
        """Return a worker with room for a job, the least busy one. Raises RunFailed if there has been none for too
        long.
        """
        most = self.config.rollout.concurrency
        while True:
            ready = [worker for worker in self.workers if worker.ready]
            free = [one for one in ready if len(one.running) < most and one not in self._reserved]
            if free:
                return min(free, key=lambda worker: self._cost(worker, job))
            now = time.monotonic()
            self._alone_since = now if ready else self._alone_since
            if now - self._alone_since > ALL_LOST:
                errors = "; ".join(
                    sorted({worker.seen.error for worker in self.workers if worker.seen.error})
                )
                raise RunFailed(
                    f"No worker could be reached for {now - self._alone_since:.0f} s: {errors}",
                    hint="`agentrl doctor --cluster` checks them; `agentrl train --resume last` continues the run.",
                )
            await self._change()

    async def _idle_worker(self, job: Job) -> RemoteWorker:
        """Return a worker for this job alone: if it is lost again, no other job was the cause."""
        while True:
            worker = await self._free_worker(job)
            self._reserved.add(worker)
            while worker.running and worker.ready:
                await self._change()
            if worker.ready:
                return worker
            self._reserved.discard(worker)

    async def _change(self) -> None:
        """Wait until a job ends or a worker comes, or a second has passed."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._changed.wait()

    def _cost(self, worker: RemoteWorker, job: Job) -> tuple[int, int]:
        """Return a deterministic engine makes a job in its own slot only: a worker where that is free comes first."""
        slot, most = job.slot, self.config.rollout.concurrency
        fixed = self.config.deterministic and slot >= 0
        same = (
            sum(one.order.job.slot % most == slot % most for one in worker.running.values())
            if fixed
            else 0
        )
        return same, len(worker.running)

    # --- weights -----------------------------------------------------------------------------------------------------

    def policy(self, loaded: Loaded) -> Policy:
        """Return the loaded policy, publishing to all workers if it can be trained."""
        if isinstance(loaded.policy, TrainablePolicy):
            return ClusterPolicy(loaded.policy, loaded.model, self)
        return loaded.policy

    async def publish(self, version: str, model: nn.Module | None) -> None:
        """As in Publisher. A worker that is lost meanwhile gets the weights when it is back."""
        async with self._changing:
            if model is not None and self._save is not None:
                self.weights = await asyncio.to_thread(self._save, model, version)
            self.version = version
            await self._each(lambda worker: worker.load(version, self.weights))

    async def publish_to_servers(self, version: str, policy: Following) -> None:
        """As in Publisher."""
        async with self._changing:
            try:
                await self._each(RemoteWorker.hold)
                await policy.publish(version)
                self.version, self.weights = version, policy.published()
            finally:  # after a failure with the old weights: a worker on hold would never sample again
                await self._each(lambda worker: worker.load(self.version, self.weights))

    async def _each(self, call: Callable[[RemoteWorker], Awaitable[None]]) -> None:
        calls = [call(worker) for worker in self.workers if worker.ready]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, WorkerLost):
                raise error

    def take_metrics(self) -> dict[str, float]:
        """As in Publisher."""
        return summed(self.workers)

    def describe(self) -> str:
        return f"{self.count} workers ({self.config.cluster.kind})"

    # --- workers -----------------------------------------------------------------------------------------------------

    async def _admit(self, worker: RemoteWorker) -> None:
        """Start a worker, and let it take jobs once it has the newest weights."""
        await worker.open()
        while not worker.ready:
            version, weights = self.version, self.weights
            await worker.load(
                version, weights
            )  # without the lock: an update waits for no worker that starts
            async with self._changing:
                if worker.lost is not None and worker.lost.done():
                    raise worker.lost.result()
                worker.ready = (version, weights) == (self.version, self.weights)
        self._wake()

    async def _replace(self, worker: RemoteWorker) -> None:
        """Start a worker again each time that it is lost."""
        while True:
            assert worker.lost is not None
            error = await asyncio.shield(worker.lost)
            if not any(other.ready for other in self.workers):
                self._alone_since = time.monotonic()
            self._report("warn", f"{error.message} Its episodes are given to other workers.")
            self._wake()
            pause = FIRST_PAUSE
            while not worker.ready:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                try:
                    await self._admit(worker)
                except AgentRLError as problem:
                    worker.seen.error = problem.message
            self._report("info", f"Worker {worker.number} is back.")

    def _report(self, level: str, text: str) -> None:
        if level == "warn":
            _LOG.warning(text)
        if self.store is not None:
            self.store.journal.add_log(self._run_id, level, text)
            self.store.journal.add_event(self._run_id, "worker", {"text": text})

    def _wake(self) -> None:
        self._changed.set()

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(SHOWN)
            self._write_rows()

    def _write_rows(self) -> None:
        """Write what is known of each worker for the screens."""
        if self.store is not None and self._run_id is not None:
            self.store.workers.put([self._row(worker, self._run_id) for worker in self.workers])

    def _row(self, worker: RemoteWorker, run_id: str) -> WorkerRow:
        seen, hello = worker.seen, worker.hello
        return WorkerRow(
            run_id,
            worker.number,
            kind=self.config.cluster.kind,
            node=hello.node if hello is not None else "",
            pid=hello.pid if hello is not None else 0,
            state="closed" if self._closed else "ready" if worker.ready else "starting",
            version=seen.status.version,
            running=len(worker.running),
            finished=seen.finished,
            tokens=seen.tokens,
            rate=seen.rate,
            lost=seen.lost,
            error=seen.error,
            at=time.time(),
        )


def summed(workers: Sequence[RemoteWorker]) -> dict[str, float]:
    """Metrics of all workers, taken: counts are summed, peaks and levels too, each worker's own largest and last."""
    total: dict[str, float] = {}
    for worker in workers:
        own: dict[str, float] = {}
        for found in worker.metrics:
            for name, value in found.items():
                old = own.get(name, 0.0)
                level = name == SERVERS or name.startswith("rollout/kv")
                own[name] = (
                    max(old, value) if name.endswith("peak") else value if level else old + value
                )
        worker.metrics.clear()
        for name, value in own.items():
            old = total.get(name, 0.0)
            total[name] = min(total.get(name, value), value) if name == SERVERS else old + value
    return total


@contextlib.asynccontextmanager
async def open_pool(
    config: Config,
    base: Path,
    loaded: Loaded,
    packs: Mapping[str, Pack],
    store: Store | None = None,
    *,
    spec: str | None = None,
    trainable: bool = False,
    same: bool = True,
) -> AsyncIterator[WorkerPool]:
    """Yield the workers of a run by its configuration, started. Raises an AgentRLError if they cannot be started.

    `same=False`: nodes may have other versions or other code than this process.
    """
    kind = config.cluster.kind
    served = isinstance(loaded.policy, Following)
    policy = loaded.policy
    if trainable and not served and isinstance(policy, TrainablePolicy) and policy.separate_weights:
        raise ConfigError(
            f"cluster.kind is {kind}, and {policy.name} samples with weights that workers cannot be given.",
            hint="Train with cluster.kind: here, or give it `hold`, `adopt` and `published` as the vllm backend has.",
        )
    name = spec or config.model.name
    where = str(loaded.folder) if "@" in name and loaded.folder is not None else name
    rollout = config.rollout.model_copy(
        update={"async_staleness": 0}
    )  # a worker's model is not trained: no copy of it
    import torch

    threads = torch.get_num_threads()  # with deterministic the same arithmetic as here
    threads = threads if config.deterministic else max(1, threads // config.cluster.workers)
    trainable = trainable and not served  # servers have the weights: a worker loads none
    setup = Setup(
        config.model_copy(update={"rollout": rollout}), base, where, trainable, threads=threads
    )
    recorder, discard = None, (lambda episode_id: None)
    if store is not None:
        require_local(Path(store.path))
        recorder, discard = StoreRecorder(store), store.episodes.discard
    with resolve("workers", LINKS, kind)(config, base) as (links, save):
        workers = [
            RemoteWorker(number, link, setup, recorder, discard)
            for number, link in enumerate(links)
        ]
        pool = WorkerPool(workers, config, store, save)
        try:
            await pool.open(loaded.policy.weights_version)
            if same:
                require_same(
                    packs, [worker.hello for worker in workers if worker.hello is not None]
                )
            yield pool
        finally:
            await pool.close()
