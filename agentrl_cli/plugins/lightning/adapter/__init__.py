"""Adapters: spans as training triplets or as messages."""

from agentrl_cli.plugins.lightning.adapter.base import Adapter, OtelTraceAdapter, TraceAdapter
from agentrl_cli.plugins.lightning.adapter.messages import OpenAIMessages, TraceToMessages
from agentrl_cli.plugins.lightning.adapter.triplet import (
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TraceToTripletBase,
)

__all__ = [
    "Adapter",
    "LlmProxyTraceToTriplet",
    "OpenAIMessages",
    "OtelTraceAdapter",
    "RewardMatchPolicy",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTripletBase",
    "TracerTraceToTriplet",
]
