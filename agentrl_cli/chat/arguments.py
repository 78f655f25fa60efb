"""Validates a call's arguments against a tool's JSON Schema, with answers that a model can act on.

`jsonschema` validates; this module chooses the first error in the order of the arguments and words it. Stricter than
the standard in two places: an argument that the schema does not name is an error (the answer suggests the nearest
name) unless `additionalProperties` allows it, and `3.0` is not an integer. Nothing is fetched: a `$ref` to an address
cannot be resolved.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from agentrl_cli.chat.parsers.base import kind
from agentrl_cli.errors import nearest
from agentrl_cli.types import ToolSchema

if TYPE_CHECKING:
    from jsonschema import ValidationError

log = logging.getLogger(__name__)

TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
LIMITS = {
    "minimum": "must be at least {}",
    "maximum": "must be at most {}",
    "exclusiveMinimum": "must be greater than {}",
    "exclusiveMaximum": "must be less than {}",
    "minLength": "must have at least {} characters",
    "maxLength": "must have at most {} characters",
    "minItems": "must have at least {} items",
    "maxItems": "must have at most {} items",
    "pattern": "must match {}",
}
ORDER = ("type", "const", "enum", "additionalProperties", "required")
"""Which of several errors in one place is reported: the first of these."""
MOST_ERRORS = 100
"""Errors that are looked at to find the first."""
MAX_MESSAGE = 200
"""Characters of a message of the library's own, which repeats the value."""


def parameters_of(schema: ToolSchema) -> Mapping[str, Any]:
    """Return the JSON Schema of a tool's parameters, from an OpenAI function schema or given directly."""
    function = schema.get("function", schema)
    parameters = function.get("parameters", function if "properties" in function else {})
    return parameters if isinstance(parameters, Mapping) else {}


def validate_arguments(schema: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """Return the first error of `arguments`, worded for the model; None if they are valid.

    A schema that cannot be used (a broken `pattern` or `$ref`) is logged once and checks nothing: the tool decides.
    """
    parameters = {"type": "object", "additionalProperties": False, **parameters_of(schema)}
    parameters.setdefault("properties", {})
    value = dict(arguments)
    try:
        found = list(islice(_errors(parameters, value), MOST_ERRORS))
        return _describe(_first(found, value)) if found else None
    except RecursionError:
        return "the arguments are nested too deeply"
    except Exception as error:  # noqa: BLE001  (a schema comes from anywhere: it can make the library raise anything)
        _report(f"{type(error).__name__}: {error}")
        return None


def example_arguments(schema: ToolSchema) -> dict[str, Any]:
    """Return arguments of the right shape, with placeholder values: the required ones, or all if none is required."""
    parameters = parameters_of(schema)
    properties = parameters.get("properties", {})
    names = [name for name in properties if name in parameters.get("required", ())] or list(
        properties
    )
    return {name: _example(properties[name]) for name in names}


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kinds = schema.get("type", "string")
    first = kinds[0] if isinstance(kinds, list) else kinds
    return {
        "integer": 0,
        "number": 0,
        "boolean": True,
        "array": [],
        "object": {},
        "null": None,
    }.get(first, "...")


@cache
def _report(reason: str) -> None:
    log.warning(
        "The JSON Schema of a tool cannot be used, so its arguments are not checked: %s", reason
    )


def _errors(schema: Mapping[str, Any], value: Any) -> Iterator[ValidationError]:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    validator = _strict(validator_for(schema, default=Draft202012Validator))
    errors: Iterator[ValidationError] = validator(schema, registry=Registry()).iter_errors(
        value
    )  # fetches nothing
    return errors


@cache
def _strict(base: Any) -> Any:
    """Return a validator of the library with JSON's types as Python values have them, and lenient
    about unknown types.
    """
    from jsonschema import ValidationError
    from jsonschema.validators import extend

    def check_type(
        validator: Any, types: Any, value: Any, schema: Any
    ) -> Iterator[ValidationError]:
        names = [types] if isinstance(types, str) else types
        if not any(name not in TYPES or validator.is_type(value, name) for name in names):
            yield ValidationError("")

    types = base.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda checker, value: (
                isinstance(value, int) and not isinstance(value, bool)
            ),
            "array": lambda checker, value: isinstance(value, (list, tuple)),
        }
    )
    return extend(base, {"type": check_type}, type_checker=types)


def _first(errors: Iterable[ValidationError], value: Any) -> ValidationError:
    """Return the error that comes first in `value`; of an object before those of its members."""

    def place(error: ValidationError) -> tuple[list[int], int]:
        inner, positions = value, []
        for part in error.relative_path:
            positions.append(list(inner).index(part) if isinstance(inner, dict) else int(part))
            inner = inner[part]
        return positions, ORDER.index(error.validator) if error.validator in ORDER else len(ORDER)

    return min(errors, key=place)


def _describe(error: ValidationError) -> str:
    path, value, wanted = _write_path(error.absolute_path), error.instance, error.validator_value
    name = f'argument "{path}"' if path else "the arguments"
    match error.validator:
        case "type":
            names = [wanted] if isinstance(wanted, str) else list(wanted)
            return f"{name} must be {' or '.join(_article(type_) for type_ in names)}, not {_describe_value(value)}"
        case "const":
            return f"{name} must be {_json(wanted)}"
        case "enum":
            return f"{name} must be one of {', '.join(map(_json, wanted))}"
        case "additionalProperties" if wanted is False:
            return _describe_unknown(path, value, error.schema)
        case "required":
            return f'argument "{_join_path(path, _missing(value, error.schema)[0])}" is missing'
        case "anyOf" | "oneOf" if error.context:
            inner = _describe(
                _first([one for one in error.context if one.relative_schema_path[0] == 0], value)
            )
            return inner if len(wanted) == 1 else f"{name} fits none of its types: {inner}"
        case validator if validator in LIMITS:
            return f"{name} {LIMITS[validator].format(wanted)}"
    return f"{name}: {error.message[:MAX_MESSAGE]}"


def _describe_unknown(path: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return the error for the first argument that the schema does not name, with the nearest name or all of them."""
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    first = next(
        key
        for key in value
        if key not in properties and not any(re.search(p, key) for p in patterns)
    )
    close = nearest(str(first), _missing(value, schema) or properties, n=1)
    known = ", ".join(f'"{key}"' for key in properties) or "none"
    return f'unknown argument "{_join_path(path, first)}"' + (
        f', did you mean "{close[0]}"?' if close else f"; there are: {known}"
    )


def _missing(value: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    return [key for key in schema.get("required", ()) if key not in value]


def _describe_value(value: Any) -> str:
    shown = _json(value)
    return f"{kind(value)} ({shown})" if len(shown) <= 40 else kind(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _article(name: str) -> str:
    return "null" if name == "null" else f"{'an' if name[0] in 'aio' else 'a'} {name}"


def _write_path(parts: Iterable[str | int]) -> str:
    path = ""
    for part in parts:
        path = f"{path}[{part}]" if isinstance(part, int) else _join_path(path, part)
    return path


def _join_path(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
