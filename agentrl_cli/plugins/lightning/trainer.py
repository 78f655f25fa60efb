"""`Trainer`: puts agent, algorithm, store, runners and hooks together.

An algorithm and its runners run beside each other as threads of this process, each with an event loop.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import logging
import multiprocessing.synchronize
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal

from agentrl_cli.agents.gateway.http import place_of
from agentrl_cli.plugins.lightning.adapter import TracerTraceToTriplet
from agentrl_cli.plugins.lightning.algorithm.base import (
    BATCH,
    Algorithm,
    Baseline,
    FastAlgorithm,
    rows,
)
from agentrl_cli.plugins.lightning.algorithm.training import GRPO
from agentrl_cli.plugins.lightning.litagent import LitAgent
from agentrl_cli.plugins.lightning.runner import LitAgentRunner, Runner
from agentrl_cli.plugins.lightning.semconv import (
    LightningEnvVar,
    resolve_bool_env_var,
    resolve_int_env_var,
    resolve_str_env_var,
)
from agentrl_cli.plugins.lightning.store import (
    PORT,
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    serving,
)
from agentrl_cli.plugins.lightning.tracer import OtelTracer, Tracer
from agentrl_cli.plugins.lightning.types import Hook, NamedResources

AlgorithmBundle = Callable[[LightningStore, "ExecutionEvent"], Coroutine[Any, Any, None]]
RunnerBundle = Callable[[LightningStore, int, "ExecutionEvent"], Coroutine[Any, Any, None]]


ThreadingEvent = threading.Event
ExecutionEvent = threading.Event | multiprocessing.synchronize.Event
"""Set when everything is to end."""


def MultiprocessingEvent(*, ctx: BaseContext | None = None) -> ExecutionEvent:
    """Return an event that other processes see, for a strategy of the user's own."""
    return (ctx or multiprocessing).Event()


class SharedMemoryExecutionStrategy:
    """Threads. `main_thread` is the one of the two that gets this thread."""

    alias = "shm"

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: Literal["algorithm", "runner"] = "runner",
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
    ) -> None:
        """`managed_store`, `graceful_delay` and `poll_interval` have no effect: stores take threads, nothing polls."""
        if main_thread not in ("algorithm", "runner"):
            raise ValueError("main_thread must be 'algorithm' or 'runner'")
        if main_thread == "runner" and n_runners != 1:
            raise ValueError("When main_thread is 'runner', n_runners must be 1.")
        self.n_runners, self.main_thread, self.join_timeout = n_runners, main_thread, join_timeout
        self.role = "both"

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Run both; the first error stops all and is raised. A Ctrl-C, too."""
        stop, errors = threading.Event(), []

        def run(name: str, part: Coroutine[Any, Any, None]) -> None:
            try:
                asyncio.run(part)
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread below
                errors.append(error)
            if errors or name == "algorithm":
                stop.set()

        parts = []
        if self.role in ("algorithm", "both"):
            parts.append(("algorithm", algorithm(store, stop)))
        if self.role in ("runner", "both"):
            parts += [(f"runner-{n}", runner(store, n, stop)) for n in range(self.n_runners)]
        main = next((part for part in parts if part[0].startswith(self.main_thread)), parts[0])
        threads = [
            threading.Thread(target=run, args=part, name=part[0], daemon=True)
            for part in parts
            if part is not main
        ]
        for thread in threads:
            thread.start()
        try:
            run(*main)
        finally:
            for thread in threads:
                forever = thread.name == "algorithm" and not errors
                thread.join(None if forever else self.join_timeout)
        if errors:
            raise errors[0]


ExecutionStrategy = SharedMemoryExecutionStrategy
"""A strategy of the user's own overrides `execute`."""


class ClientServerExecutionStrategy(SharedMemoryExecutionStrategy):
    """Agent-Lightning's default. With `role` `algorithm` or `runner` this process is one side of several.

    They meet in a SqliteLightningStore, else at the algorithm's store, which is served at host and port.
    """

    alias = "cs"

    def __init__(
        self,
        role: Literal["algorithm", "runner", "both"] | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: tuple[int, ...] = (0, -15),
    ) -> None:
        """Raises ValueError for a role that is none of the three."""
        super().__init__(n_runners, main_process, graceful_timeout, managed_store=managed_store)
        found = resolve_str_env_var(LightningEnvVar.AGL_CURRENT_ROLE, role, "both") or "both"
        if found not in ("algorithm", "runner", "both"):
            raise ValueError("role must be one of 'algorithm', 'runner', or 'both'")
        self.role = found
        self.server_host = (
            resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, server_host, "localhost")
            or "localhost"
        )
        self.server_port = (
            resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, server_port, PORT) or PORT
        )
        self.managed_store = resolve_bool_env_var(
            LightningEnvVar.AGL_MANAGED_STORE, managed_store, True
        )

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Run this process's side. Raises ConnectionError if no algorithm's store answers a runner."""
        if self.role == "both" or store.capabilities.get("zero_copy") or not self.managed_store:
            super().execute(algorithm, runner, store)
        elif self.role == "algorithm":
            with serving(store, self.server_host, self.server_port):
                super().execute(algorithm, runner, store)
        else:
            at = LightningStoreClient(f"http://{place_of(self.server_host, self.server_port)}")
            super().execute(algorithm, runner, at)


_LOG = logging.getLogger(__name__)
ALIASES = {"shm": SharedMemoryExecutionStrategy, "cs": ClientServerExecutionStrategy}
OLD = {"n_workers": "n_runners", "max_tasks": "max_rollouts", "triplet_exporter": "adapter"}


class Trainer:
    """`fit` trains the agent, `dev` tries it on a few tasks.

    A component is an instance, a class, a function that makes one, a dotted name, or a dict with `type` and arguments.
    """

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        algorithm: Any = None,
        llm_proxy: Any = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        daemon: bool = True,
        triplet_exporter: Any = None,
        hooks: Any = None,
        agent: LitAgent[Any] | None = None,
        project: str | Path = ".",
    ) -> None:
        """`n_runners`: attempts at once. `agent` may be given here in place of `fit`. `project`: where `runs/` is.

        `daemon` and `port` have no effect: no processes are started, and no port is opened.
        """
        for old, new in OLD.items():
            if locals()[old] is not None:
                text = f"`{old}` is deprecated. Please use `{new}`."
                warnings.warn(text, DeprecationWarning, stacklevel=2)
        self._dev, self.daemon, self.port, self.project = dev, daemon, port, project
        wanted = n_runners if n_runners is not None else n_workers
        self.max_rollouts = max_rollouts if max_rollouts is not None else max_tasks
        self.initial_resources, self.agent = initial_resources, agent
        self.tracer = build_component(tracer, Tracer, OtelTracer)
        exporter = adapter or triplet_exporter
        self.adapter: Any = build_component(exporter, object, TracerTraceToTriplet)
        self.algorithm = build_component(algorithm, Algorithm, None)
        named = ALIASES.get(strategy, strategy) if isinstance(strategy, str) else strategy
        named, count = named or ClientServerExecutionStrategy, {"n_runners": wanted or 1}
        self.strategy = build_component(named, ExecutionStrategy, None, count)
        self.n_runners = wanted if wanted is not None else self.strategy.n_runners
        self.store = build_component(store, LightningStore, InMemoryLightningStore)
        given = {"tracer": self.tracer, "max_rollouts": self.max_rollouts, "poll_interval": 0.05}
        self.runner = build_component(runner, Runner, LitAgentRunner, given)
        self.llm_proxy = build_component(llm_proxy, object, None, {"store": self.store})
        single = isinstance(hooks, Hook) or not isinstance(hooks, Sequence)
        self.hooks = tuple(one for one in ((hooks,) if single else hooks) if one is not None)

    def fit(self, agent: Any = None, train_dataset: Any = None, *, val_dataset: Any = None) -> None:
        """Train. If the trainer has its agent, the first argument is the training data.

        Raises AgentRLErrors, and the exceptions of the algorithm or a runner.
        """
        if self._dev:
            return self.dev(agent, train_dataset, val_dataset=val_dataset)
        train_dataset = self._take(agent, train_dataset)
        if not isinstance(self.algorithm, GRPO):
            return self._execute(self.algorithm, train_dataset, val_dataset)
        self._prepare(self.algorithm)
        return self.algorithm.run(train_dataset, val_dataset)

    def dev(self, agent: Any = None, train_dataset: Any = None, *, val_dataset: Any = None) -> None:
        """Run at most ten tasks and log their spans; nothing is learnt. Raises TypeError for a slow algorithm."""
        train_dataset = self._take(agent, train_dataset)
        algorithm = self.algorithm if self.algorithm is not None else Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                "Trainer.dev() requires an algorithm that inherits from FastAlgorithm."
                f" Received {type(algorithm).__name__}."
            )
        first = None if train_dataset is None else rows(train_dataset, BATCH)
        held = None if val_dataset is None else rows(val_dataset, BATCH - len(first or ()))
        self._execute(algorithm, first, held)

    def _take(self, agent: Any, train_dataset: Any) -> Any:
        """Set the agent; returns the training data. Raises TypeError without an agent."""
        if self.agent is not None and train_dataset is None and not isinstance(agent, LitAgent):
            agent, train_dataset = None, agent
        self.agent = agent if agent is not None else self.agent
        if not isinstance(self.agent, LitAgent):
            raise TypeError(
                f"The agent must be a LitAgent or a function under @rollout, not {type(self.agent).__name__}."
            )
        self.agent.set_trainer(self)
        return train_dataset

    def _prepare(self, algorithm: Algorithm) -> None:
        algorithm.set_trainer(self)
        algorithm.set_store(self.store)
        algorithm.set_adapter(self.adapter)
        if self.initial_resources is not None:
            algorithm.set_initial_resources(self.initial_resources)
        if self.llm_proxy is not None:
            algorithm.set_llm_proxy(self.llm_proxy)

    def _execute(self, algorithm: Algorithm | None, train_dataset: Any, val_dataset: Any) -> None:
        """Run an algorithm beside its runners; without one the runners take rollouts until a Ctrl-C."""
        if algorithm is not None:
            self._prepare(algorithm)

        async def learn(store: LightningStore, event: Any) -> None:
            if algorithm is None:
                while not event.is_set():
                    await asyncio.sleep(0.1)
                return
            answer = algorithm.run(train_dataset=train_dataset, val_dataset=val_dataset)
            if inspect.isawaitable(answer):
                await answer

        async def work(store: LightningStore, worker_id: int, event: Any) -> None:
            runner, agent = copy.copy(self.runner), self.agent
            given = {"agent": agent, "store": store, "hooks": self.hooks, "worker_id": worker_id}
            with runner.run_context(**given):
                await runner.iter(event=event)

        self.strategy.execute(learn, work, self.store)


def build_component(
    spec: Any,
    expected_type: type[Any],
    default: Callable[..., Any] | None,
    optional: Mapping[str, Any] | None = None,
) -> Any:
    """Return the component of a specification, made with those `optional` arguments that it takes. Raises TypeError."""
    spec = default if spec is None else spec
    arguments: dict[str, Any] = {}
    if isinstance(spec, Mapping):
        arguments = {key: value for key, value in spec.items() if key != "type"}
        spec = spec.get("type", default)
    if isinstance(spec, str):
        module, _, name = spec.rpartition(".")
        spec = getattr(importlib.import_module(module), name)
    if isinstance(spec, type) or inspect.isfunction(spec):
        names = inspect.signature(spec).parameters
        spec = spec(
            **{
                **{key: value for key, value in (optional or {}).items() if key in names},
                **arguments,
            }
        )
    if spec is not None and not isinstance(spec, expected_type):
        raise TypeError(f"{type(spec).__name__} is not a {expected_type.__name__}.")
    return spec
