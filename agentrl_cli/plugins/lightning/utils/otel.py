"""Attributes of spans: nested values as flat ones and back, tags and links."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from agentrl_cli.plugins.lightning.semconv import LightningSpanAttributes, LinkPydanticModel

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
    root: dict[str, Any] = {}
    for key, value in flat_data.items():
        *path, leaf = key.split(".")
        place = root
        for part in path:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[leaf] = value

    def lists(node: Any) -> Any:
        if not isinstance(node, dict) or not node:
            return node
        inner = {key: lists(value) for key, value in node.items()}
        if set(inner) == {str(index) for index in range(len(inner))}:
            return [inner[str(index)] for index in range(len(inner))]
        return inner

    found: dict[str, Any] | list[Any] = lists(root)
    return found


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
