"""`Algorithm`, `@algo`, and `Baseline`, which only runs the tasks and logs their spans."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, Literal

from agentrl_cli.plugins.lightning.types import NamedResources, RolloutMode

_LOG = logging.getLogger(__name__)
BATCH = 10
"""Tasks of `Trainer.dev` at most."""


class Algorithm:
    """Override `run`, sync or async."""

    _trainer: Any = None
    _llm_proxy: Any = None
    _store: Any = None
    _adapter: Any = None
    _initial_resources: NamedResources | None = None

    def is_async(self) -> bool:
        """Whether `run` is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        self._llm_proxy = llm_proxy

    def set_adapter(self, adapter: Any) -> None:
        self._adapter = adapter

    def set_store(self, store: Any) -> None:
        self._store = store

    def set_initial_resources(self, resources: NamedResources) -> None:
        self._initial_resources = resources

    def get_trainer(self) -> Any:
        return self._require("trainer")

    def get_adapter(self) -> Any:
        return self._require("adapter")

    def get_store(self) -> Any:
        return self._require("store")

    def get_llm_proxy(self) -> Any:
        return self._llm_proxy

    def get_initial_resources(self) -> NamedResources | None:
        return self._initial_resources

    def _require(self, name: str) -> Any:
        found = getattr(self, f"_{name}")
        if found is None:
            raise ValueError(f"{name.capitalize()} has not been set for this algorithm.")
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        """Put rollouts into the store, and learn from their spans."""
        raise NotImplementedError("Subclasses must implement run().")


class FunctionalAlgorithm(Algorithm):
    """A function, sync or async, as an algorithm; it gets the arguments that its parameters name."""

    def __init__(self, algorithm_func: Callable[..., Any]) -> None:
        self._function = algorithm_func
        self._names = set(inspect.signature(algorithm_func).parameters)
        functools.update_wrapper(self, algorithm_func)

    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        """Call the function. Raises TypeError for a dataset that it does not take."""
        given = {"train_dataset": train_dataset, "val_dataset": val_dataset}
        for name, value in given.items():
            if value is not None and name not in self._names:
                raise TypeError(
                    f"{name} is provided but not supported by the algorithm function: {self._function}"
                )
        for name in self._names & {"store", "adapter", "llm_proxy", "initial_resources"}:
            given[name] = getattr(self, f"get_{name}")()
        return self._function(
            **{name: value for name, value in given.items() if name in self._names}
        )


algo = FunctionalAlgorithm


class FastAlgorithm(Algorithm):
    """One that is quick enough for `Trainer.dev`."""


class Baseline(FastAlgorithm):
    """Runs every task and logs its status, spans and adapted data. Nothing is learnt."""

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
    ) -> None:
        """`train_split`: share of the tasks to train on without a `val_dataset`. Raises ValueError."""
        if not 0.0 < train_split < 1.0:
            raise ValueError("train_split must be between 0 and 1.")
        self.n_epochs, self.train_split = n_epochs, train_split
        self.max_queue_length, self.span_verbosity = max_queue_length, span_verbosity

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Queue the tasks, at most `max_queue_length` at a time, and wait for each."""
        store, proxy = self.get_store(), self.get_llm_proxy()
        resources = dict(self.get_initial_resources() or {})
        if proxy is not None and not resources:
            resources["main_llm"] = proxy.as_resource()
        if resources or await store.get_latest_resources() is None:
            await store.add_resources(resources)
        train, held = rows(train_dataset), rows(val_dataset)
        if val_dataset is None:
            cut = max(1, int(len(train) * self.train_split))
            train, held = train[:cut], train[cut:]
        room = asyncio.Semaphore(self.max_queue_length)

        async def attempt(mode: RolloutMode, task: Any) -> None:
            async with room:
                queued = await store.enqueue_rollout(task, mode)
                [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id])
                await self._log(ended)

        for _ in range(self.n_epochs):
            waiting = [attempt("train", task) for task in train]
            await asyncio.gather(*waiting, *(attempt("val", task) for task in held))

    async def _log(self, rollout: Any) -> None:
        name, attempts = rollout.rollout_id, rollout.attempt.sequence_id
        spans = await self.get_store().query_spans(name, "latest")
        _LOG.info("[Rollout %s] %s after %d attempts", name, rollout.status, attempts)
        for span in spans if self.span_verbosity != "none" else ():
            whole = self.span_verbosity == "key_values"
            shown = span.attributes if whole else list(span.attributes)
            _LOG.info("[Rollout %s] #%d %s: %s", name, span.sequence_id, span.name, shown)
        if self._adapter is not None and spans:
            _LOG.info("[Rollout %s] Adapted data: %s", name, self._adapter.adapt(spans))


def rows(dataset: Any, most: int | None = None) -> list[Any]:
    """Return the items of a dataset, the first `most` of them; none of None."""
    return [] if dataset is None else [dataset[index] for index in range(len(dataset))[:most]]
