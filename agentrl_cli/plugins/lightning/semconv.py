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


class LightningResourceAttributes(Enum):
    """Attributes of a span's resource."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
    TRACER_NAME = "agentlightning.tracer.name"


class SpanNames(StrEnum):
    """Names of spans and of resource attributes; older than this module's constants."""

    REWARD = AGL_REWARD
    MESSAGE = AGL_MESSAGE
    OBJECT = AGL_OBJECT
    EXCEPTION = AGL_EXCEPTION
    VIRTUAL = AGL_VIRTUAL
    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"


class SpanAttributeNames(StrEnum):
    """The attributes of 0.1."""

    MESSAGE = "message"
    OBJECT = "object"


class LightningSpanAttributes(Enum):
    """Attributes that emitters write."""

    REWARD = "agentlightning.reward"
    LINK = "agentlightning.link"
    TAG = "agentlightning.tag"
    MESSAGE_BODY = "agentlightning.message.body"
    OBJECT_TYPE = "agentlightning.object.type"
    OBJECT_LITERAL = "agentlightning.object.literal"
    OBJECT_JSON = "agentlightning.object.json"
    OPERATION_NAME = "agentlightning.operation.name"
    OPERATION_INPUT = "agentlightning.operation.input"
    OPERATION_OUTPUT = "agentlightning.operation.output"


class RewardAttributes(Enum):
    """Parts of one dimension of a reward."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class RewardPydanticModel(BaseModel):
    """One dimension of a reward."""

    name: str
    value: float


class LinkAttributes(Enum):
    """Parts of a link to other spans."""

    KEY_MATCH = "key_match"
    VALUE_MATCH = "value_match"


class LinkPydanticModel(BaseModel):
    """A link to the spans that have this value."""

    key_match: str
    value_match: str
