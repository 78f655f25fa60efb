"""Names of spans and attributes, as Agent-Lightning 0.x writes them."""

from __future__ import annotations

from enum import Enum, StrEnum

from pydantic import BaseModel

AGENTLIGHTNING = "agentlightning"
AGL_ANNOTATION = "agentlightning.annotation"
AGL_MESSAGE = "agentlightning.message"
AGL_OBJECT = "agentlightning.object"
AGL_EXCEPTION = "agentlightning.exception"
AGL_OPERATION = "agentlightning.operation"
AGL_REWARD = "agentlightning.reward"
AGL_VIRTUAL = "agentlightning.virtual"
LLM_CALL = "openai.chat.completion"
"""Name of the span of a model call."""

LightningResourceAttributes = Enum(
    "LightningResourceAttributes",
    {
        "ROLLOUT_ID": "agentlightning.rollout_id",
        "ATTEMPT_ID": "agentlightning.attempt_id",
        "SPAN_SEQUENCE_ID": "agentlightning.span_sequence_id",
        "TRACER_NAME": "agentlightning.tracer.name",
    },
)
"""Attributes of a span's resource."""

SpanNames = StrEnum(
    "SpanNames",
    {
        "REWARD": "agentlightning.reward",
        "MESSAGE": "agentlightning.message",
        "OBJECT": "agentlightning.object",
        "EXCEPTION": "agentlightning.exception",
        "VIRTUAL": "agentlightning.virtual",
        "ROLLOUT_ID": "agentlightning.rollout_id",
        "ATTEMPT_ID": "agentlightning.attempt_id",
        "SPAN_SEQUENCE_ID": "agentlightning.span_sequence_id",
    },
)
"""Names of spans and of resource attributes; older than this module's constants."""

SpanAttributeNames = StrEnum("SpanAttributeNames", {"MESSAGE": "message", "OBJECT": "object"})
"""The attributes of 0.1."""

LightningSpanAttributes = Enum(
    "LightningSpanAttributes",
    {
        "REWARD": "agentlightning.reward",
        "LINK": "agentlightning.link",
        "TAG": "agentlightning.tag",
        "MESSAGE_BODY": "agentlightning.message.body",
        "OBJECT_TYPE": "agentlightning.object.type",
        "OBJECT_LITERAL": "agentlightning.object.literal",
        "OBJECT_JSON": "agentlightning.object.json",
        "OPERATION_NAME": "agentlightning.operation.name",
        "OPERATION_INPUT": "agentlightning.operation.input",
        "OPERATION_OUTPUT": "agentlightning.operation.output",
    },
)
"""Attributes that emitters write."""

RewardAttributes = Enum("RewardAttributes", {"REWARD_NAME": "name", "REWARD_VALUE": "value"})
"""Parts of one dimension of a reward."""

LinkAttributes = Enum("LinkAttributes", {"KEY_MATCH": "key_match", "VALUE_MATCH": "value_match"})
"""Parts of a link to other spans."""


class RewardPydanticModel(BaseModel):
    """One dimension of a reward."""

    name: str
    value: float


class LinkPydanticModel(BaseModel):
    """A link to the spans that have this value."""

    key_match: str
    value_match: str
