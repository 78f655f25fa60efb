"""The workers of a run: gives out jobs, again when a worker is lost, brings weights, replaces workers.

The only writer to the store is this process: the records of workers arrive as messages. A job's seeds are in the job,
so it does not matter which worker makes it. A worker that is lost costs the turns that it was making: its jobs are
given again with the same seeds, at most twice, then the episode is an `env_error`; a fresh worker takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl_cli.config import Config
from agentrl_cli.errors import AgentRLError, BadAnswer, PolicyError, RunFailed
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.plugins.ray.remote import SERVERS, RemoteWorker, WorkerLost
from agentrl_cli.plugins.ray.service import Following, Weights
from agentrl_cli.plugins.ray.settings import ClusterConfig
from agentrl_cli.policies.protocols import Policy, Served, Sleeping, TrainablePolicy
from agentrl_cli.rollout.attempt import new_episode
from agentrl_cli.rollout.context import Attempted, RolloutContext
from agentrl_cli.rollout.flags import flag_names
from agentrl_cli.rollout.job import Job
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

Save = Callable[["nn.Module", str], Weights]
"""Makes the trained weights of a model, under a version's name, loadable by workers."""

_LOG = logging.getLogger(__name__)


class WorkerPool:
    """N workers. Use `open_pool`."""

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        config: Config,
        store: Store | None,
        save: Save | None = None,
    ) -> None:
        """`save` makes the trained weights of a model loadable by workers."""
        self.workers = workers
        self.count = len(workers)
        self.config = config
        self.store = store
        self.version = ""
        self.weights: Weights = None
        self._save = save
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
        """Start all workers, with weights that are called `version`. Raises the first one's refusal.

        A worker that is lost meanwhile (killed for memory, a node that goes) is started once more.
        """
        self.version = version
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(self._begin(worker))
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
        """Return the ended episode of a job, stored: as in Workers."""
        self._run_id = context.run.id if context.run is not None else None
        error: AgentRLError = WorkerLost("")
        for last in [False] * AGAIN + [True]:
            worker = await (self._idle_worker(job) if last else self._free_worker(job))
            try:
                with waiting(f"worker {worker.number}, which has task {job.task.id}"):
                    return await worker.attempt(job, context)
            except BadAnswer:
                raise
            except (WorkerLost, PolicyError) as lost:
                # A policy's machine may be the cause of its error, and another one may do it.
                if isinstance(lost, PolicyError) or not isinstance(error, PolicyError):
                    error = lost
            finally:
                if last:
                    self._reserved.discard(worker)
                self._changed.set()
        if isinstance(error, PolicyError):
            raise error
        return self._give_up(job, error, context)

    def _give_up(self, job: Job, error: AgentRLError, context: RolloutContext) -> Attempted:
        """Return the episode of a job that was lost each time."""
        begun = new_episode(job, self.version)
        text = f"The worker was lost {AGAIN + 1} times. {error.message}"
        ended = begun.with_(outcome=Outcome.ENV_ERROR, error=text, ended=time.time())
        ended = ended.with_(flags=flag_names(ended, []))
        context.recorder.start(begun, job.task.split, context.chat.tokenizer.hash)
        context.recorder.finish(ended)
        return Attempted(ended)

    async def _free_worker(self, job: Job) -> RemoteWorker:
        """Return a worker with room for a job, the least busy one. Raises RunFailed if there has been none for too
        long.
        """
        most = self.config.rollout.concurrency
        while True:
            ready = [worker for worker in self.workers if worker.ready]
            free = [one for one in ready if len(one.jobs) < most and one not in self._reserved]
            if free:
                # A deterministic engine makes a job in its own slot only: where that is free comes before any other.
                slot = job.slot % most if self.config.deterministic and job.slot >= 0 else -1
                return min(
                    free,
                    key=lambda one: (
                        sum(held.slot % most == slot for held in one.jobs),
                        len(one.jobs),
                    ),
                )
            now = time.monotonic()
            self._alone_since = now if ready else self._alone_since
            if now - self._alone_since > ALL_LOST:
                errors = "; ".join(sorted({one.row.error for one in self.workers if one.row.error}))
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
            try:
                while worker.jobs and worker.ready:
                    await self._change()
            except asyncio.CancelledError:  # else no job would ever get this worker again
                self._reserved.discard(worker)
                raise
            if worker.ready:
                return worker
            self._reserved.discard(worker)

    async def _change(self) -> None:
        """Wait until a job ends or a worker comes, or a second has passed."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._changed.wait()

    # --- weights -----------------------------------------------------------------------------------------------------

    def policy(self, loaded: Loaded) -> Policy:
        """Return the loaded policy, publishing to all workers if it can be trained."""
        if isinstance(loaded.policy, TrainablePolicy):
            return ClusterPolicy(loaded.policy, loaded.model, self)
        return loaded.policy

    async def publish(self, version: str, policy: TrainablePolicy, model: nn.Module | None) -> None:
        """Publish by this process's policy, and let every worker sample with the new weights.

        No worker samples from servers meanwhile. A worker that is lost gets the weights when it is back. Without
        `model` only the name changes.
        """
        async with self._changing:
            try:
                if isinstance(policy, Following):
                    await self._each(lambda worker: worker.call("hold"))
                await policy.publish(version)
                if isinstance(policy, Following):
                    self.weights = policy.last_published()
                elif model is not None and self._save is not None:
                    self.weights = await asyncio.to_thread(self._save, model, version)
                self.version = version
            finally:  # after a failure with the old weights: a worker on hold would never sample again
                with waiting("the workers, which load new weights"):
                    await self._each(lambda worker: worker.load(self.version, self.weights))

    async def _each(self, call: Callable[[RemoteWorker], Awaitable[None]]) -> None:
        calls = [call(worker) for worker in self.workers if worker.ready]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, WorkerLost):
                raise error

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of all workers' policies since the last call: sums, and the fewest servers."""
        total: dict[str, float] = {}
        for worker in self.workers:
            for name, value in worker.metrics.items():
                old = total.get(name, value if name == SERVERS else 0.0)
                total[name] = min(old, value) if name == SERVERS else old + value
            worker.metrics.clear()
        return total

    # --- workers -----------------------------------------------------------------------------------------------------

    async def _begin(self, worker: RemoteWorker) -> None:
        try:
            await self._admit(worker)
        except WorkerLost as error:
            _LOG.warning(f"{error.message} It is started once more.")
            await self._admit(worker)

    async def _admit(self, worker: RemoteWorker) -> None:
        """Start a worker, and let it take jobs once it has the newest weights."""
        await worker.open()
        while not worker.ready:
            version, weights = self.version, self.weights
            await worker.load(
                version, weights
            )  # no lock: an update waits for no worker that starts
            async with self._changing:
                if worker.lost is not None and worker.lost.done():
                    raise worker.lost.result()
                worker.ready = (version, weights) == (self.version, self.weights)
        self._changed.set()

    async def _replace(self, worker: RemoteWorker) -> None:
        """Start a worker again each time that it is lost."""
        while True:
            assert worker.lost is not None
            error = await asyncio.shield(worker.lost)
            if not any(other.ready for other in self.workers):
                self._alone_since = time.monotonic()
            _LOG.warning(text := f"{error.message} Its episodes are given to other workers.")
            self._report("warn", text)
            self._changed.set()
            pause = FIRST_PAUSE
            while not worker.ready:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                try:
                    await self._admit(worker)
                except AgentRLError as problem:
                    worker.row = replace(worker.row, error=problem.message)
            self._report("info", f"Worker {worker.number} is back.")

    def _report(self, level: str, text: str) -> None:
        if self.store is not None:
            self.store.journal.add_log(self._run_id, level, text)
            self.store.journal.add_event(self._run_id, "worker", {"text": text})

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(SHOWN)
            self._write_rows()

    def _write_rows(self) -> None:
        """Write the state of each worker for the screens."""
        if self.store is not None and self._run_id is not None:
            kind, rows = self.config.section(ClusterConfig).kind, []
            for worker in self.workers:
                state = "closed" if self._closed else "ready" if worker.ready else "starting"
                row = replace(worker.row, run_id=self._run_id, kind=kind, state=state)
                rows.append(replace(row, running=len(worker.jobs), at=time.time()))
            self.store.workers.put(rows)


class ClusterPolicy:
    """A trainable policy of this process, and the same one in every worker, to which it publishes, too."""

    def __init__(self, inner: TrainablePolicy, model: Any, workers: WorkerPool) -> None:
        self.inner, self.model, self.workers = inner, model, workers
        self.name, self.context_length = inner.name, inner.context_length
        self.untrainable, self.separate_weights = inner.untrainable, inner.separate_weights
        self.generate, self.release = inner.generate, inner.release
        self.close, self.rest = inner.close, inner.rest
        self.take_metrics = workers.take_metrics

    @property
    def weights_version(self) -> str:
        return self.inner.weights_version

    @weights_version.setter
    def weights_version(self, version: str) -> None:
        self.inner.weights_version = version

    def servers(self) -> Sequence[Policy]:
        return self.inner.servers() if isinstance(self.inner, Served) else ()

    async def sleep(self) -> None:
        if isinstance(self.inner, Sleeping):
            await self.inner.sleep()

    async def publish(self, version: str) -> None:
        await self.workers.publish(version, self.inner, self.model)

    def describe(self) -> str:
        kind = self.workers.config.section(ClusterConfig).kind
        return f"{self.inner.describe()}, {self.workers.count} workers ({kind})"
