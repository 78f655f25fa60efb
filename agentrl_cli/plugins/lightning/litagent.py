"""Agents: a class with `rollout`, or a function under `@rollout`."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from agentrl_cli.plugins.lightning.types import (
    LLM,
    AttemptedRollout,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Rollout,
)

T = TypeVar("T")
RUNNER: ContextVar[Any] = ContextVar("agentlightning_runner", default=None)
"""The runner of the running attempt."""


class LitAgent(Generic[T]):
    """Override `rollout` or `rollout_async`, or those for training and validation.

    They get the task, the resources by name and the rollout, and return None (the reward was emitted), the final
    reward, or spans.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        if trained_agents is not None:
            text = "`trained_agents` is deprecated. Configure `agent_match` in adapter instead."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        self.trained_agents = trained_agents

    def is_async(self) -> bool:
        """Whether any coroutine method is overridden."""
        names = ("training_rollout_async", "validation_rollout_async", "rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in names)

    def set_trainer(self, trainer: Any) -> None:
        """Called by the trainer."""
        # Weak: the trainer holds the agent, and no cycle shall keep its model alive.
        self._trainer_ref = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """Return the trainer. Raises ValueError without one."""
        return _alive(self.__dict__.get("_trainer_ref"), "Trainer")

    trainer = property(get_trainer)

    def set_runner(self, runner: Any) -> None:
        """Called by a runner."""
        self._runner_ref = weakref.ref(runner)

    def get_runner(self) -> Any:
        """Return the runner of the running attempt, or the last that was set. Raises ValueError without one."""
        return RUNNER.get() or _alive(self.__dict__.get("_runner_ref"), "Runner")

    runner = property(get_runner)

    def get_tracer(self) -> Any:
        """Return the runner's tracer."""
        return self.runner.tracer

    tracer = property(get_tracer)

    def on_rollout_start(self, task: Any, runner: Any, tracer: Any) -> None:
        """Before an attempt. Deprecated: use a Hook."""

    def on_rollout_end(self, task: Any, rollout: Rollout, runner: Any, tracer: Any) -> None:
        """After an attempt. Deprecated: use a Hook."""

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> Any:
        """Make one attempt at a task."""
        raise NotImplementedError("Agents must implement the `rollout` method.")

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> Any:
        """Return the same as a coroutine."""
        raise NotImplementedError(
            "Agents must implement the `rollout_async` method for async operations."
        )

    def training_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> Any:
        """Return an attempt in training."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> Any:
        """Return an attempt in an evaluation."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> Any:
        """Return an attempt in training."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> Any:
        """Return an attempt in an evaluation."""
        return await self.rollout_async(task, resources, rollout)


def _alive(reference: Any, what: str) -> Any:
    if reference is None:
        raise ValueError(f"{what} has not been set for this agent.")
    found = reference()
    if found is None:
        raise ValueError(
            f"{what} reference is no longer valid (object has been garbage collected)."
        )
    return found


class FunctionalLitAgent(LitAgent[T]):
    """A function as an agent; calling it calls the function."""

    def __init__(self, rollout_func: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        """`strip_proxy`: the function gets a ProxyLLM as an LLM with the address for its attempt."""
        super().__init__()
        self._rollout_func, self._strip_proxy = rollout_func, strip_proxy
        self._names = set(inspect.signature(rollout_func).parameters)
        functools.update_wrapper(self, rollout_func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rollout_func(*args, **kwargs)

    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self._rollout_func)

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> Any:
        """Call the function."""
        return self._rollout_func(task, **self._arguments_for(resources, rollout))

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> Any:
        """Await the function."""
        return await self.rollout(task, resources, rollout)

    def _arguments_for(self, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        """Return the arguments that the function names. Raises ValueError if a resource is missing."""
        found: dict[str, Any] = {"rollout": rollout} if "rollout" in self._names else {}
        for name, kind in (("llm", LLM), ("prompt_template", PromptTemplate)):
            if name in self._names:
                some = [value for value in resources.values() if isinstance(value, kind)]
                if not some:
                    raise ValueError(
                        f"No {kind.__name__} resource found in the provided resources."
                    )
                found[name] = some[0]
        if isinstance(found.get("llm"), ProxyLLM) and self._strip_proxy:
            if not isinstance(rollout, AttemptedRollout):
                raise ValueError(
                    "Rollout is not an AttemptedRollout: a ProxyLLM has an address for attempts only."
                )
            found["llm"] = found["llm"].with_attempted_rollout(rollout)
        return found


def llm_rollout(func: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """`(task, llm[, rollout])` as an agent. Raises ValueError for another signature."""
    if func is None:
        return functools.partial(llm_rollout, strip_proxy=strip_proxy)
    _require(func, "llm")
    return FunctionalLitAgent(func, strip_proxy=strip_proxy)


def prompt_rollout(func: Callable[..., Any] | None = None) -> Any:
    """`(task, prompt_template[, rollout])` as an agent. Raises ValueError for another signature."""
    if func is None:
        return prompt_rollout
    _require(func, "prompt_template")
    return FunctionalLitAgent(func)


def rollout(func: Callable[..., Any]) -> FunctionalLitAgent[Any]:
    """`(task, …)` as an agent; its arguments follow from the names of its parameters. Raises NotImplementedError."""
    try:
        _require(func, "llm", "prompt_template")
    except ValueError as error:
        raise NotImplementedError(str(error)) from error
    return FunctionalLitAgent(func)


def _require(func: Callable[..., Any], *one_of: str) -> None:
    """Raise ValueError unless a function takes the task first, and one of these."""
    signature = inspect.signature(func)
    names = list(signature.parameters)
    if names[:1] != ["task"] or not set(one_of) & set(names):
        text = " or ".join(f"(task, {name}[, rollout])" for name in one_of)
        raise ValueError(f"The signature of {func} is {signature}; an agent's is {text}.")
