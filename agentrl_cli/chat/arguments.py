"""Check a call's arguments against a tool's JSON Schema, with answers a model can act on.

Covers what tool schemas use: type, enum, const, properties, required, items, anyOf, oneOf, bounds and lengths. An
argument the schema does not know is an error (it names the nearest), unless `additionalProperties` allows it.
Strict where Python would trip: `true` is no integer, `3.0` is no integer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentrl_cli.chat.parsers.base import kind
from agentrl_cli.errors import nearest
from agentrl_cli.types import ToolSchema

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def parameters_of(schema: ToolSchema) -> Mapping[str, Any]:
    """The JSON Schema of a tool's parameters, from an OpenAI function schema or given directly."""
    function = schema.get("function", schema)
    parameters = function.get("parameters", function if "properties" in function else {})
    return parameters if isinstance(parameters, Mapping) else {}


def validate_arguments(schema: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with `arguments`, None where they fit. The text speaks to the model."""
    parameters = {"type": "object", "additionalProperties": False, **parameters_of(schema)}
    parameters.setdefault("properties", {})
    return _check(dict(arguments), parameters, "")


def example_arguments(schema: ToolSchema) -> dict[str, Any]:
    """Arguments of the right shape, with `…` or 0 for values: the required ones, or all where none is."""
    parameters = parameters_of(schema)
    properties = parameters.get("properties", {})
    names = [name for name in properties if name in parameters.get("required", ())] or list(properties)
    return {name: _example(properties[name]) for name in names}


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kinds = schema.get("type", "string")
    first = kinds[0] if isinstance(kinds, list) else kinds
    return {"integer": 0, "number": 0, "boolean": True, "array": [], "object": {}, "null": None}.get(first, "...")


def _check(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            problems = [_check(value, option, path) for option in schema[key]]
            if all(problems):
                return problems[0] if len(problems) == 1 else f"{_name(path)} fits none of its types: {problems[0]}"
    problem = _check_type(value, schema, path) or _check_limits(value, schema, path)
    if problem:
        return problem
    if isinstance(value, dict):
        return _check_object(value, schema, path)
    if isinstance(value, (list, tuple)) and isinstance(schema.get("items"), Mapping):
        checks = (_check(item, schema["items"], f"{path}[{index}]") for index, item in enumerate(value))
        return next((problem for problem in checks if problem), None)
    return None


def _check_type(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else list(wanted or [])
    if names and not any(_is(value, name) for name in names):
        shown = json.dumps(value, ensure_ascii=False, default=str)
        given = f"{kind(value)} ({shown})" if len(shown) <= 40 else kind(value)
        return f"{_name(path)} must be {' or '.join(_article(name) for name in names)}, not {given}"
    if "const" in schema and value != schema["const"]:
        return f"{_name(path)} must be {json.dumps(schema['const'])}"
    if schema.get("enum") and value not in schema["enum"]:
        options = ", ".join(json.dumps(option, ensure_ascii=False) for option in schema["enum"])
        return f"{_name(path)} must be one of {options}"
    return None


def _check_limits(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    sized = isinstance(value, (str, list, tuple))
    unit = "characters" if isinstance(value, str) else "items"
    checks = (
        ("minimum", number, lambda limit: value < limit, "must be at least {}"),
        ("maximum", number, lambda limit: value > limit, "must be at most {}"),
        ("exclusiveMinimum", number, lambda limit: value <= limit, "must be greater than {}"),
        ("exclusiveMaximum", number, lambda limit: value >= limit, "must be less than {}"),
        ("minLength", sized, lambda limit: len(value) < limit, f"must have at least {{}} {unit}"),
        ("maxLength", sized, lambda limit: len(value) > limit, f"must have at most {{}} {unit}"),
        ("minItems", sized, lambda limit: len(value) < limit, f"must have at least {{}} {unit}"),
        ("maxItems", sized, lambda limit: len(value) > limit, f"must have at most {{}} {unit}"),
        ("pattern", isinstance(value, str), lambda limit: not re.search(limit, value), "must match {}"),
    )
    for key, applies, fails, text in checks:
        if applies and key in schema and fails(schema[key]):
            return f"{_name(path)} {text.format(schema[key])}"
    return None


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str | None:
    properties: Mapping[str, Any] = schema.get("properties", {})
    extra = schema.get("additionalProperties", True)
    unknown = [name for name in value if name not in properties] if extra is False else []
    missing = [name for name in schema.get("required", ()) if name not in value]
    if unknown:
        close = nearest(str(unknown[0]), missing or properties, n=1)
        hint = f', did you mean "{close[0]}"?' if close else ""
        known = ", ".join(f'"{name}"' for name in properties) or "none"
        return f'there is no argument "{_join(path, str(unknown[0]))}"{hint or f"; there are: {known}"}'
    if missing:
        return f'argument "{_join(path, missing[0])}" is missing'
    for name, item in value.items():
        inner = properties.get(name, extra if isinstance(extra, Mapping) else {})
        problem = _check(item, inner, _join(path, name))
        if problem:
            return problem
    return None


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES.get(name, (object,)))


def _article(name: str) -> str:
    return "null" if name == "null" else f"{'an' if name[0] in 'aio' else 'a'} {name}"


def _name(path: str) -> str:
    return f'argument "{path}"' if path else "the arguments"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
