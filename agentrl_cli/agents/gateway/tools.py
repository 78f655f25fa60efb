"""Tools of a request in normal form: OpenAI's nested function schemas with a name, a description and parameters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentrl_cli.agents.gateway.request import bad
from agentrl_cli.types import ToolSchema


def read_tools(value: Any, param: str = "tools") -> tuple[ToolSchema, ...]:
    """Return the functions of a request in normal form, nested or flat.

    Raises RequestError for anything but a function.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad(f"{param} must be a list.", param)
    found = tuple(_tool(tool, f"{param}[{number}]") for number, tool in enumerate(value))
    counts = Counter(tool["function"]["name"] for tool in found)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise bad(f"{param} has two functions named {twice!r}.", param)
    return found


def _tool(tool: Any, param: str) -> ToolSchema:
    if not isinstance(tool, Mapping):
        raise bad(f"{param} must be an object.", param)
    kind = tool.get("type", "function")
    if kind not in ("function", "custom") or (kind == "custom" and "input_schema" not in tool):
        raise bad(
            f"{param}: tools of type {kind!r} are not served; functions are.",
            param,
            "unsupported_tool",
        )
    inner = tool.get("function", tool)
    return function(inner if isinstance(inner, Mapping) else {}, param)


def function(given: Mapping[str, Any], param: str) -> ToolSchema:
    """Return a function in normal form. Raises RequestError without a name, or without a JSON Schema."""
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise bad(f"{param}: a function must have a name.", param)
    schema = given.get("parameters", given.get("input_schema")) or {}
    if problem := schema_problem(schema):
        raise bad(
            f"{param}: the parameters of {name!r} are not a JSON Schema: {problem}.",
            param,
            "invalid_schema",
        )
    parameters = {"type": "object", **schema}
    if not isinstance(parameters.get("properties"), Mapping):
        parameters["properties"] = {}
    description = given.get("description") or ""
    body = {"name": name, "description": str(description), "parameters": parameters}
    return {"type": "function", "function": body}


def schema_problem(schema: Any) -> str:
    """Return why a value is not a JSON Schema of an object; empty if it is."""
    if not isinstance(schema, Mapping):
        return "it is not an object"
    if schema.get("type", "object") != "object":
        return f"its type is {schema['type']!r}, not 'object'"
    try:
        text = json.dumps(schema)
    except RecursionError:
        return "it is nested too deeply"
    return _problem(text)


@lru_cache(maxsize=1024)
def _problem(schema: str) -> str:
    """Return the same for a JSON text. An agent sends its tools with every call, and the check takes longer than a
    forward.
    """
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(json.loads(schema))
    except SchemaError as error:
        return str(error.message)[:200]
    except RecursionError:
        return "it is nested too deeply"
    return ""


def chosen_tool(name: Any, tools: Sequence[ToolSchema], param: str = "tool_choice") -> str:
    """Return a function named by `tool_choice`. Raises RequestError if the request has no such tool."""
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise bad(f"{param} names {name!r}; the tools are: {', '.join(known) or 'none'}.", param)
    return str(name)
