# The public names, for type checkers and for __getattr__ in __init__.py.
# ruff: noqa: I001 - sorted, each name would have a statement of its own
from typing import Any
from agentrl_cli.plugins.lightning.adapter import (
    Adapter as Adapter,
    LlmProxyTraceToTriplet as LlmProxyTraceToTriplet,
    OtelTraceAdapter as OtelTraceAdapter,
    TraceAdapter as TraceAdapter,
    TracerTraceToTriplet as TracerTraceToTriplet,
    TraceToMessages as TraceToMessages,
    TraceToTripletBase as TraceToTripletBase,
)
from agentrl_cli.plugins.lightning.algorithm import (
    algo as algo,
    Algorithm as Algorithm,
    APO as APO,
    Baseline as Baseline,
    FastAlgorithm as FastAlgorithm,
    MiniGRPO as MiniGRPO,
    TRLTrainer as TRLTrainer,
    VERL as VERL,
)
from agentrl_cli.plugins.lightning.emitter import (
    emit_annotation as emit_annotation,
    emit_exception as emit_exception,
    emit_message as emit_message,
    emit_object as emit_object,
    emit_reward as emit_reward,
    find_final_reward as find_final_reward,
    find_reward_spans as find_reward_spans,
    get_message_value as get_message_value,
    get_object_value as get_object_value,
    get_reward_value as get_reward_value,
    get_rewards_from_span as get_rewards_from_span,
    is_reward_span as is_reward_span,
    operation as operation,
    reward as reward,
)
from agentrl_cli.plugins.lightning.semconv import (
    LightningEnvVar as LightningEnvVar,
    resolve_bool_env_var as resolve_bool_env_var,
    resolve_int_env_var as resolve_int_env_var,
    resolve_str_env_var as resolve_str_env_var,
)
from agentrl_cli.plugins.lightning.trainer import (
    ClientServerExecutionStrategy as ClientServerExecutionStrategy,
    ExecutionEvent as ExecutionEvent,
    ExecutionStrategy as ExecutionStrategy,
    MultiprocessingEvent as MultiprocessingEvent,
    SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy,
    ThreadingEvent as ThreadingEvent,
)
from agentrl_cli.plugins.lightning.types import (
    configure_logger as configure_logger,
    LoggingHook as LoggingHook,
    setup_logging as setup_logging,
)
from agentrl_cli.plugins.lightning.litagent import (
    LitAgent as LitAgent,
    llm_rollout as llm_rollout,
    prompt_rollout as prompt_rollout,
    rollout as rollout,
)
from agentrl_cli.plugins.lightning.llm_proxy import LLMProxy as LLMProxy
from agentrl_cli.plugins.lightning.runner import (
    LitAgentRunner as LitAgentRunner,
    Runner as Runner,
)
from agentrl_cli.plugins.lightning.semconv import (
    SpanAttributeNames as SpanAttributeNames,
    SpanNames as SpanNames,
)
from agentrl_cli.plugins.lightning.spans import (
    Attributes as Attributes,
    AttributeValue as AttributeValue,
    Event as Event,
    Link as Link,
    OtelResource as OtelResource,
    Span as Span,
    SpanContext as SpanContext,
    SpanCoreFields as SpanCoreFields,
    SpanLike as SpanLike,
    SpanRecordingContext as SpanRecordingContext,
    StatusCode as StatusCode,
    TraceState as TraceState,
    TraceStatus as TraceStatus,
)
from agentrl_cli.plugins.lightning.store import (
    InMemoryLightningStore as InMemoryLightningStore,
    LightningStore as LightningStore,
    LightningStoreCapabilities as LightningStoreCapabilities,
    LightningStoreStatistics as LightningStoreStatistics,
    LightningStoreThreaded as LightningStoreThreaded,
    SqliteLightningStore as SqliteLightningStore,
)
from agentrl_cli.plugins.lightning.store import (
    LightningStoreClient as LightningStoreClient,
    LightningStoreServer as LightningStoreServer,
)
from agentrl_cli.plugins.lightning.tracer import (
    AgentOpsTracer as AgentOpsTracer,
    clear_active_tracer as clear_active_tracer,
    DummyTracer as DummyTracer,
    get_active_tracer as get_active_tracer,
    OtelTracer as OtelTracer,
    set_active_tracer as set_active_tracer,
    Tracer as Tracer,
)
from agentrl_cli.plugins.lightning.trainer import (
    build_component as build_component,
    Trainer as Trainer,
)
from agentrl_cli.plugins.lightning.types import (
    Attempt as Attempt,
    AttemptedRollout as AttemptedRollout,
    AttemptStatus as AttemptStatus,
    Dataset as Dataset,
    EnqueueRolloutRequest as EnqueueRolloutRequest,
    Hook as Hook,
    LLM as LLM,
    NamedResources as NamedResources,
    PaginatedResult as PaginatedResult,
    ParallelWorkerBase as ParallelWorkerBase,
    PromptTemplate as PromptTemplate,
    ProxyLLM as ProxyLLM,
    Resource as Resource,
    ResourcesUpdate as ResourcesUpdate,
    ResourceUnion as ResourceUnion,
    Rollout as Rollout,
    RolloutConfig as RolloutConfig,
    RolloutMode as RolloutMode,
    RolloutRawResult as RolloutRawResult,
    RolloutStatus as RolloutStatus,
    TaskInput as TaskInput,
    Triplet as Triplet,
    Worker as Worker,
    WorkerStatus as WorkerStatus,
)

OFFERS: dict[str, dict[str, Any]]
