"""Runners: they take rollouts, run the agent inside a trace, and keep its spans."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.plugins.lightning.emitter import emit_reward, find_final_reward
from agentrl_cli.plugins.lightning.litagent import RUNNER, LitAgent
from agentrl_cli.plugins.lightning.spans import Span, SpanCoreFields
from agentrl_cli.plugins.lightning.store import LightningStore
from agentrl_cli.plugins.lightning.tracer import Tracer
from agentrl_cli.plugins.lightning.types import (
    AttemptedRollout,
    NamedResources,
    ParallelWorkerBase,
    Rollout,
    RolloutMode,
)

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class LitAgentRunner(ParallelWorkerBase, Generic[T]):
    """Runs a LitAgent: a coroutine in the event loop, a function in a thread of its own."""

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        interval_jitter: float = 0.5,
        heartbeat_launch_mode: Literal["asyncio", "thread"] = "thread",
        heartbeat_include_gpu: bool = False,
    ) -> None:
        """The store is looked at every `poll_interval` seconds, and hears of the worker every `heartbeat_interval`.

        `interval_jitter`, `heartbeat_launch_mode` and `heartbeat_include_gpu` have no effect.
        """
        super().__init__()
        self._tracer, self._max = tracer, max_rollouts
        self._poll, self._beat = poll_interval, heartbeat_interval
        self._agent: LitAgent[T] | None = None
        self._store: LightningStore | None = None
        self._hooks: list[Any] = []

    def init(
        self, agent: LitAgent[T], *, hooks: Sequence[Any] | None = None, **kwargs: Any
    ) -> None:
        """Run this agent from here on."""
        self._agent, self._hooks = agent, list(hooks or ())
        agent.set_runner(self)
        self._tracer.init()

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Use this store."""
        self._store, self.worker_id = store, worker_id
        self._tracer.init_worker(worker_id, store)

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """End the worker."""
        self.worker_id = None
        self._tracer.teardown_worker(worker_id)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Forget agent, store and hooks."""
        self._agent, self._store, self._hooks = None, None, []
        self._tracer.teardown()

    @contextlib.contextmanager
    def run_context(
        self,
        *,
        agent: LitAgent[T],
        store: LightningStore,
        hooks: Sequence[Any] | None = None,
        worker_id: int | None = None,
    ) -> Iterator[LitAgentRunner[T]]:
        """Runs `init` and `teardown` around the block: for scripts that call `step` themselves."""
        number = worker_id or 0
        self.init(agent=agent, hooks=hooks)
        try:
            self.init_worker(number, store)
            try:
                yield self
            finally:
                self.teardown_worker(number)
        finally:
            self.teardown()

    @property
    def tracer(self) -> Tracer:
        return self._tracer

    def get_agent(self) -> LitAgent[T]:
        """Return the agent. Raises ValueError before `init`."""
        if self._agent is None:
            raise ValueError("Agent not initialized. Call init() first.")
        return self._agent

    def get_store(self) -> LightningStore:
        """Return the store. Raises ValueError before `init_worker`."""
        if self._store is None:
            raise ValueError("Store not initialized. Call init_worker() first.")
        return self._store

    def get_worker_id(self) -> str:
        """Its name in the store."""
        return "Worker-Unknown" if self.worker_id is None else f"Worker-{self.worker_id}"

    async def iter(self, *, event: Any = None) -> None:
        """Take rollouts until the event is set, or there were `max_rollouts`."""
        store, done = self.get_store(), 0
        beating = asyncio.create_task(self._beats(store)) if self._beat > 0 else None
        try:
            while not (event is not None and event.is_set()) and (
                self._max is None or done < self._max
            ):
                taken = await store.dequeue_rollout(worker_id=self.get_worker_id())
                if taken is None:
                    await _sleep(self._poll, event)
                    continue
                with contextlib.suppress(Exception):  # logged, and the attempt has failed
                    await self._attempt(taken)
                done += 1
        finally:
            if beating is not None:
                beating.cancel()

    async def step(
        self,
        input: T,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: Any = None,
    ) -> Rollout:
        """Run one task at once; returns its rollout. Raises the agent's exceptions."""
        store = self.get_store()
        given = None if resources is None else (await store.add_resources(resources)).resources_id
        started = await store.start_rollout(input, mode, given, worker_id=self.get_worker_id())
        reward = await self._attempt(started)
        found = await store.get_rollout_by_id(started.rollout_id) or started
        found._reward = reward
        return found

    async def _attempt(self, rollout: AttemptedRollout) -> float | None:
        """Run the agent; returns the final reward. Raises the agent's exceptions, after its attempt has failed."""
        store, agent, status, spans = self.get_store(), self.get_agent(), "failed", []
        token = RUNNER.set(self)
        try:
            found = (
                await store.get_resources_by_id(rollout.resources_id)
                if rollout.resources_id
                else await store.get_latest_resources()
            )
            if found is None:
                raise RuntimeError(
                    f"The rollout {rollout.rollout_id} has no resources: add some to the store first."
                )
            await self._call("on_rollout_start", rollout)
            async with self._tracer.trace_context(
                rollout.rollout_id,
                store=store,
                rollout_id=rollout.rollout_id,
                attempt_id=rollout.attempt.attempt_id,
            ):
                await self._call("on_trace_start", rollout)
                agent.on_rollout_start(rollout.input, self, self._tracer)
                result = await self._run(agent, rollout, found.resources)
                await self._call("on_trace_end", rollout)
            spans = await self._result(store, rollout, result)
            rollout._reward = find_final_reward(spans)
            status = "succeeded"
            return rollout.reward
        except Exception:
            _LOG.exception("%s: the rollout %s failed", self.get_worker_id(), rollout.rollout_id)
            spans = spans or self._tracer.get_last_trace()
            raise
        finally:
            await self._call("on_rollout_end", rollout, spans)
            try:
                agent.on_rollout_end(rollout.input, rollout, self, self._tracer)
            except Exception:  # noqa: BLE001 - as a hook's: without its end an attempt would run for ever
                _LOG.exception("on_rollout_end of the agent failed; the rollout continues")
            RUNNER.reset(token)
            try:
                await store.update_attempt(
                    rollout.rollout_id,
                    rollout.attempt.attempt_id,
                    status=status,  # type: ignore[arg-type]
                )
            except Exception:
                _LOG.exception("The end of the rollout %s cannot be stored", rollout.rollout_id)
                raise

    async def _run(self, agent: LitAgent[T], rollout: Rollout, resources: NamedResources) -> Any:
        name = "training_rollout" if rollout.mode == "train" else "validation_rollout"
        method: Any = getattr(agent, f"{name}_async" if agent.is_async() else name)
        given: dict[str, Any] = {"resources": resources, "rollout": rollout}
        if "rollout_id" in inspect.signature(method).parameters:  # as in 0.1
            given = {"resources": resources, "rollout_id": rollout.rollout_id}
        if agent.is_async():
            return await method(rollout.input, **given)
        return await in_thread(method, rollout.input, **given)

    async def _result(
        self, store: LightningStore, rollout: AttemptedRollout, result: Any
    ) -> list[Span]:
        """Return the attempt's spans, with those that the result adds.

        Raises TypeError for a result of another kind.
        """
        spans = self._tracer.get_last_trace()
        if result is None:
            return spans
        if isinstance(result, (bool, int, float)):
            result = [emit_reward(float(result), propagate=False)]
        items = result if isinstance(result, list) else [result]
        where = (rollout.rollout_id, rollout.attempt.attempt_id)
        numbers = await store.get_many_span_sequence_ids([where] * len(items))
        added = [
            _as_span(item, *where, number) for item, number in zip(items, numbers, strict=True)
        ]
        await store.add_many_spans(added)
        return [*spans, *added]

    async def _call(
        self, event: str, rollout: Rollout, spans: Sequence[Span] | None = None
    ) -> None:
        """Call the hooks; their errors are logged."""
        given = {
            "agent": self.get_agent(),
            "runner": self,
            "tracer": self._tracer,
            "rollout": rollout,
        }
        given |= {"spans": list(spans or ()), "task": rollout.input}
        for method in [getattr(hook, event) for hook in self._hooks if hasattr(hook, event)]:
            try:
                answer = method(**_select_arguments(method, given))
                if inspect.isawaitable(answer):
                    await answer
            except Exception:  # noqa: BLE001 - a hook's error ends no rollout, and is logged
                _LOG.exception("the hook %s failed; the rollout continues", method.__qualname__)

    async def _beats(self, store: LightningStore) -> None:
        while True:
            await store.update_worker(self.get_worker_id())
            await asyncio.sleep(self._beat)


Runner = LitAgentRunner
"""Runners of the user's own override what they change."""


def _select_arguments(method: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a method names; all but the task if it takes any."""
    parameters = inspect.signature(method).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    names = {*parameters, *(given.keys() - {"task"} if takes_any else ())}
    return {name: value for name, value in given.items() if name in names}


def _as_span(item: Any, rollout_id: str, attempt_id: str, number: int) -> Span:
    if isinstance(item, Span):
        return item
    if isinstance(item, SpanCoreFields):
        return Span.from_core_fields(
            item, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=number
        )
    if hasattr(item, "get_span_context"):
        return Span.from_opentelemetry(item, rollout_id, attempt_id, number)
    kind = type(item).__name__
    raise TypeError(f"A rollout returns None, a number, or a list of spans, not {kind}.")


async def _sleep(seconds: float, event: Any) -> None:
    """Wait, at most until the event is set."""
    end = asyncio.get_running_loop().time() + seconds
    while (left := end - asyncio.get_running_loop().time()) > 0 and not (
        event is not None and event.is_set()
    ):
        await asyncio.sleep(min(left, 0.1))
