"""Names of spans, attributes and environment variables, as Agent-Lightning 0.x writes them."""

from __future__ import annotations

import os
from enum import Enum, StrEnum
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

T = TypeVar("T", int, bool)
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


LightningEnvVar = Enum(
    "LightningEnvVar",
    {
        "AGL_EMITTER_DEBUG": "AGL_EMITTER_DEBUG",
        "AGL_MANAGED_STORE": "AGL_MANAGED_STORE",
        "AGL_CURRENT_ROLE": "AGL_CURRENT_ROLE",
        "AGL_SERVER_HOST": "AGL_SERVER_HOST",
        "AGL_SERVER_PORT": "AGL_SERVER_PORT",
    },
)
"""The variables that are read. `AGL_EMITTER_DEBUG` logs every span at level DEBUG."""


def resolve_str_env_var(
    env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None
) -> str | None:
    """Return `override`, else the variable, else `fallback`."""
    return override if override is not None else os.environ.get(env_var.value, fallback)


def resolve_int_env_var(
    env_var: LightningEnvVar, override: int | None = None, fallback: int | None = None
) -> int | None:
    """Return it as a number. Raises ValueError."""
    return _resolve(env_var, override, fallback, int)


def resolve_bool_env_var(
    env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """Return it as yes or no. Raises ValueError."""
    return _resolve(env_var, override, fallback, bool)


def _resolve(
    env_var: LightningEnvVar, override: T | None, fallback: T | None, kind: type[T]
) -> T | None:
    text = resolve_str_env_var(env_var)
    if override is not None or text is None:
        return override if override is not None else fallback
    try:
        return TypeAdapter(kind).validate_python(text.strip())
    except ValidationError as error:
        text = f"{env_var.value} is {text!r}: {error.errors()[0]['msg']}."
        raise ValueError(text) from error
