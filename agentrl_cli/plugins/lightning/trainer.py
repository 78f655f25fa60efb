"""`Trainer`: puts agent, algorithm, store, runners and hooks together."""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.plugins.lightning.adapter import TracerTraceToTriplet
from agentrl_cli.plugins.lightning.algorithm.base import BATCH, Algorithm, Baseline, FastAlgorithm
from agentrl_cli.plugins.lightning.algorithm.training import GRPO
from agentrl_cli.plugins.lightning.execution import (
    ClientServerExecutionStrategy,
    ExecutionStrategy,
    SharedMemoryExecutionStrategy,
)
from agentrl_cli.plugins.lightning.litagent import LitAgent
from agentrl_cli.plugins.lightning.runner import LitAgentRunner, Runner
from agentrl_cli.plugins.lightning.store import InMemoryLightningStore, LightningStore
from agentrl_cli.plugins.lightning.tracer import OtelTracer, Tracer
from agentrl_cli.plugins.lightning.types import Hook, NamedResources

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

    @property
    def agent_name(self) -> str:
        """The agent's name for people."""
        return str(getattr(self.agent, "__name__", type(self.agent).__name__))

    def fit(self, agent: Any = None, train_dataset: Any = None, *, val_dataset: Any = None) -> None:
        """Train. If the trainer has its agent, the first argument is the training data.

        Raises AgentRLErrors; what the algorithm or a runner raises.
        """
        if self._dev:
            return self.dev(agent, train_dataset, val_dataset=val_dataset)
        train_dataset = self._take(agent, train_dataset)
        if isinstance(self.algorithm, GRPO):
            self._prepare(self.algorithm)
            if self.llm_proxy is not None:
                _LOG.warning(
                    "llm_proxy has no effect: the trainer serves its own model to each episode."
                )
            return self.algorithm.run(train_dataset, val_dataset)
        return self._execute(self.algorithm, train_dataset, val_dataset)

    def dev(self, agent: Any = None, train_dataset: Any = None, *, val_dataset: Any = None) -> None:
        """Run at most ten tasks and log their spans; nothing is learnt. Raises TypeError for a slow algorithm."""
        train_dataset = self._take(agent, train_dataset)
        algorithm = self.algorithm if self.algorithm is not None else Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                "Trainer.dev() requires an algorithm that inherits from FastAlgorithm."
                f" Received {type(algorithm).__name__}."
            )
        first = _first(train_dataset, BATCH)
        held = _first(val_dataset, BATCH - len(first or ()))
        self._execute(algorithm, first, held)

    def _take(self, agent: Any, train_dataset: Any) -> Any:
        """Set the agent; returns the training data. Raises TypeError without an agent."""
        if (
            agent is not None
            and not isinstance(agent, LitAgent)
            and self.agent is not None
            and train_dataset is None
        ):
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
            runner = copy.copy(self.runner)
            runner.init(agent=self.agent, hooks=self.hooks)
            runner.init_worker(worker_id, store)
            try:
                await runner.iter(event=event)
            finally:
                runner.teardown_worker(worker_id)
                runner.teardown()

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


def _first(dataset: Any, count: int) -> list[Any] | None:
    return (
        None if dataset is None else [dataset[index] for index in range(min(count, len(dataset)))]
    )
