"""The data models of Agent-Lightning 0.x: rollouts, attempts, resources, triplets, hooks. Spans are in spans.py.

`LoggingHook` writes one line of the log for each rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, PrivateAttr

from agentrl_cli.plugins.lightning.semconv import SpanAttributeNames, SpanNames
from agentrl_cli.plugins.lightning.spans import (
    Attributes,
    AttributeValue,
    Event,
    Link,
    OtelResource,
    Span,
    SpanContext,
    SpanCoreFields,
    SpanLike,
    SpanRecordingContext,
    StatusCode,
    TraceState,
    TraceStatus,
)

# ruff: noqa: F401  # the names of spans.py are found here, too


T_item = TypeVar("T_item")

RolloutStatus = Literal[
    "queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"
]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
RolloutMode = Literal["train", "val", "test"]
WorkerStatus = Literal["idle", "busy", "unknown"]
TaskInput = Any
RolloutRawResult = None | float | list[Span] | list[SpanCoreFields]
"""What an agent may return: nothing, its final reward, or spans."""


class Triplet(BaseModel):
    """One model call: prompt, response, reward."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class Attempt(BaseModel):
    """One execution of a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """From 1."""
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None


class RolloutConfig(BaseModel):
    """Time limits and retries of a rollout."""

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = Field(default=1, ge=1)
    retry_condition: list[AttemptStatus] = Field(default_factory=list)


class Rollout(BaseModel):
    """One unit of work: a task's input and how far it is."""

    rollout_id: str
    input: TaskInput
    start_time: float
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None
    _reward: float | None = PrivateAttr(default=None)

    @property
    def reward(self) -> float | None:
        """The final reward, in the rollout that `on_rollout_end` gets; never stored here: the spans have it."""
        return self._reward


class AttemptedRollout(Rollout):
    """A rollout with the attempt that runs."""

    attempt: Attempt


class EnqueueRolloutRequest(BaseModel):
    """A rollout to queue."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None


class Worker(BaseModel):
    """The state of a runner."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None


# --- resources --------------------------------------------------------------------------------------------------------


class Resource(BaseModel):
    """A resource of agents that an algorithm may tune."""

    resource_type: Any


class LLM(Resource):
    """A model's address."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """Return the base URL for an OpenAI client."""
        return self.endpoint


class ProxyLLM(LLM):
    """The address of a proxy, which names the attempt that a call belongs to in its path."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # type: ignore[assignment]

    def get_base_url(self, rollout_id: str | None, attempt_id: str | None) -> str:
        """Return the base URL for one attempt; that of the proxy if both are None. Raises ValueError for one without
        other.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        if rollout_id is None or attempt_id is None:
            raise ValueError("rollout_id and attempt_id must be strings or all be empty")
        root = self.endpoint.rstrip("/")
        version = "/v1" if root.endswith("/v1") else ""
        return f"{root.removesuffix(version)}/rollout/{rollout_id}/attempt/{attempt_id}{version}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Return the model at the address for this attempt."""
        url = self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        return LLM(**{**dict(self), "resource_type": "llm", "endpoint": url})


class PromptTemplate(Resource):
    """A prompt with places to fill."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["jinja", "f-string", "poml"]

    def format(self, **kwargs: Any) -> str:
        """Return the prompt. Raises NotImplementedError for POML, which is another project's language."""
        if self.engine == "f-string":
            return self.template.format(**kwargs)
        if self.engine == "jinja":
            from jinja2.sandbox import SandboxedEnvironment

            return SandboxedEnvironment().from_string(self.template).render(**kwargs)
        raise NotImplementedError(
            "A poml template is rendered by the package poml, not by format()."
        )


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, ResourceUnion]


class ResourcesUpdate(BaseModel):
    """One version of the resources."""

    resources_id: str
    create_time: float
    update_time: float
    version: int
    resources: NamedResources


# --- the rest ---------------------------------------------------------------------------------------------------------


Dataset = Sequence
"""Anything with indices and a length will do."""


class ParallelWorkerBase:
    """Something with a life of its own in each worker."""

    def __init__(self) -> None:
        self.worker_id: int | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Before the workers start."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Called in a worker at its start."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the work."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Called in a worker at its end."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """After the workers."""


class Hook(ParallelWorkerBase):
    """Callbacks around an attempt. A method may be sync, and may name only some of its arguments.

    `on_rollout_end(self, rollout, task)` is taken, too: `task` is the rollout's input, and `rollout.reward` its reward.
    """

    async def on_trace_start(
        self, *, agent: Any, runner: Any, tracer: Any, rollout: Rollout
    ) -> None:
        """The trace has begun; the agent has not."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Rollout) -> None:
        """The agent has ended; the trace has not."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Rollout) -> None:
        """An attempt begins."""

    async def on_rollout_end(
        self, *, agent: Any, runner: Any, rollout: Rollout, spans: list[Span]
    ) -> None:
        """An attempt has ended, well or not."""


class PaginatedResult(BaseModel, Sequence[T_item], Generic[T_item]):
    """A page of a query."""

    items: Sequence[T_item]
    limit: int
    offset: int
    total: int

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __iter__(self) -> Iterator[T_item]:  # type: ignore[override]
        return iter(self.items)


class LoggingHook(Hook):
    """Logs each rollout at its end, with its reward."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        super().__init__()
        self._log = logger or logging.getLogger("agentlightning")

    def on_rollout_end(self, rollout: Rollout, task: Any) -> None:  # type: ignore[override]
        """One line."""
        reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
        self._log.info(
            "%s (%s): reward %s, task %.80s", rollout.rollout_id, rollout.mode, reward, task
        )


def setup_logging(
    level: int | str = "INFO", *, apply_to: list[str] | None = None, **options: Any
) -> logging.Logger:
    """Print the log of this package, and of the loggers in `apply_to`, to stderr.

    `options` of Agent-Lightning (console, color, propagate, …) have no effect.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] %(name)s: %(message)s"))
    for name in ("agentlightning", "agentrl_cli.plugins.lightning", *(apply_to or ())):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not any(isinstance(known, logging.StreamHandler) for known in logger.handlers):
            logger.addHandler(handler)
        logger.propagate = False
    return logging.getLogger("agentlightning")


def configure_logger(level: int = logging.INFO, name: str = "agentlightning") -> logging.Logger:
    """Return the old name of `setup_logging`."""
    return setup_logging(level, apply_to=[name])
