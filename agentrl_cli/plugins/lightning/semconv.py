"""Names of spans, attributes and environment variables, as Agent-Lightning 0.x writes them.

Nested values as flat attributes and back, tags and links: its `utils.otel`.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from agentrl_cli.hooks.loggers import nest

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


PLAIN = (str, int, float, bool)


def flatten_attributes(
    nested_data: dict[str, Any] | list[Any], *, expand_leaf_lists: bool = False
) -> dict[str, Any]:
    """Put nested values under dotted keys. A list of values of one type stays one, unless `expand_leaf_lists`."""
    flat: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise ValueError(
                        f"Only string keys are supported in dictionaries, got {key!r} in {prefix}"
                    )
                walk(inner, f"{prefix}.{key}" if prefix else key)
        elif isinstance(value, list):
            leaf = (
                bool(value)
                and type(value[0]) in PLAIN
                and {type(item) for item in value} == {type(value[0])}
            )
            if leaf and prefix and not expand_leaf_lists:
                flat[prefix] = value
                return
            for index, item in enumerate(value):
                walk(item, f"{prefix}.{index}" if prefix else str(index))
        else:
            flat[prefix] = value

    walk(nested_data, "")
    return flat


def unflatten_attributes(flat_data: Mapping[str, Any]) -> dict[str, Any] | list[Any]:
    """Return the inverse: dotted keys as nested values; keys 0, 1, 2 … make a list."""
    return nest(flat_data)


def filter_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the attributes at or under a dotted prefix."""
    return {
        key: value
        for key, value in attributes.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }


def filter_and_unflatten_attributes(
    attributes: Mapping[str, Any], prefix: str
) -> dict[str, Any] | list[Any]:
    """Return the nested value under a prefix. Raises ValueError if the prefix itself has a value."""
    found = filter_attributes(attributes, prefix)
    if prefix in found:
        raise ValueError(f"Cannot unflatten attribute with key exactly equal to prefix: {prefix}")
    return unflatten_attributes({key[len(prefix) + 1 :]: value for key, value in found.items()})


def sanitize_attributes(attributes: Mapping[str, Any], force: bool = True) -> dict[str, Any]:
    """Attributes as a span may have them: anything but a plain value becomes JSON, or with `force` a text."""
    return {key: _sane(value, force) for key, value in attributes.items()}


def _sane(value: Any, force: bool) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list) and value and all(isinstance(item, PLAIN) for item in value):
        kinds = {type(item) for item in value}
        if len(kinds) == 1:
            return list(value)
        if kinds <= {int, float, bool}:
            return (
                [float(item) for item in value] if float in kinds else [int(item) for item in value]
            )
    try:
        return json.dumps(value, default=str if force else None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Object must be JSON serializable, got: {type(value)}.") from error


def check_attributes_sanity(attributes: Mapping[Any, Any]) -> None:
    """Raise ValueError for a value that an attribute cannot have."""
    for key, value in attributes.items():
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, PLAIN) for item in items):
            raise ValueError(
                f"Attribute value must be a string, int, float, bool, or list of these, got {type(value)} for {key!r}"
            )


def format_exception_attributes(exception: BaseException) -> dict[str, Any]:
    """Return an exception as attributes."""
    trace = "".join(traceback.format_exception(type(exception), exception, exception.__traceback__))
    return {
        "exception.type": type(exception).__name__,
        "exception.message": str(exception),
        "exception.escaped": True,
        "exception.stacktrace": trace,
    }


def make_tag_attributes(tags: list[str]) -> dict[str, Any]:
    """Return attributes that hold tags."""
    return flatten_attributes({LightningSpanAttributes.TAG.value: tags}, expand_leaf_lists=True)


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """Return the tags."""
    found = filter_and_unflatten_attributes(attributes, LightningSpanAttributes.TAG.value)
    return TypeAdapter(list[str]).validate_python(found or [])


def make_link_attributes(links: Mapping[str, str]) -> dict[str, Any]:
    """Return attributes that link to the spans with these attributes, or with this `trace_id` or `span_id`."""
    made = [LinkPydanticModel(key_match=key, value_match=value) for key, value in links.items()]
    found = [link.model_dump() for link in made]
    return flatten_attributes({LightningSpanAttributes.LINK.value: found}, expand_leaf_lists=True)


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    """Return the links."""
    found = filter_and_unflatten_attributes(attributes, LightningSpanAttributes.LINK.value)
    return TypeAdapter(list[LinkPydanticModel]).validate_python(found or [])


def query_linked_spans(spans: Sequence[Any], links: list[LinkPydanticModel]) -> list[Any]:
    """Return the spans that all links mean."""

    def values(span: Any) -> dict[str, Any]:
        return {**span.attributes, "trace_id": span.trace_id, "span_id": span.span_id}

    wanted = [(link.key_match, link.value_match) for link in links]
    return [span for span in spans if all(values(span).get(key) == one for key, one in wanted)]
