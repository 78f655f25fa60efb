"""Questions about plain typed functions: how their arguments are drawn, written as code for the user to edit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from agentrl_cli.errors import ConfigError
from agentrl_cli.tools import Tool, as_tool

DATE = 'f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"'


def tools_in(module: ModuleType, notes: list[str]) -> list[Tool]:
    """Return the tools of a module: its `TOOLS`, or its own public typed functions with a docstring.

    What cannot be a tool is left out with a sentence in `notes`.
    """
    listed = getattr(module, "TOOLS", None)
    found = list(listed) if isinstance(listed, (list, tuple)) else _public(module)
    tools: list[Tool] = []
    for value in found:
        try:
            tools.append(as_tool(value))
        except ConfigError as problem:
            if listed is not None:
                raise
            notes.append(f"Left out: {problem.message} {problem.hint}".strip())
    return tools


def _public(module: ModuleType) -> list[Any]:
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, Tool) or (callable(value) and not isinstance(value, type)))
        and (isinstance(value, Tool) or getattr(value, "__module__", "") == module.__name__)
    ]


def ask(tool: Tool, target: str) -> tuple[str, str]:
    """Name and text of a function that draws a question for a tool; `target` is the expression of the tool."""
    function = tool.schema["function"]
    schema = function["parameters"]
    properties: Mapping[str, Any] = schema.get("properties", {})
    drawn = {
        name: properties[name] for name in schema.get("required", ()) if name in properties
    } or properties
    lines = [f"    {name} = {_draw(name, part)}" for name, part in drawn.items()]
    text = str(function["description"]).rstrip(" .:").replace("{", "{{").replace("}", "}}")
    text += ": " + ", ".join(f"{name} {{{name}}}" for name in drawn) if drawn else "."
    quoted = json.dumps(text, ensure_ascii=False)  # as Python writes it too
    arguments = ", ".join(f'"{name}": {name}' for name in drawn)
    name = f"ask_{re.sub(r'[^0-9a-zA-Z_]', '_', tool.name)}"
    head = f"def {name}(rng: random.Random) -> tuple[str, Any, dict[str, Any]]:"
    what = f'    """A question for {tool.name}: ask as your users would, and draw the arguments that they use."""'
    ending = [f"    return f{quoted}, {target}, {{{arguments}}}"]
    return name, "\n".join([head, what, *lines, *ending, "", "", ""])


def _draw(name: str, schema: Mapping[str, Any], depth: int = 0) -> str:
    """Return an expression that draws a value of a JSON Schema."""
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), "string")
    if schema.get("enum"):
        values = schema["enum"]
        # JSON and Python write such values alike.
        plain = all(isinstance(one, str) or type(one) in (int, float) for one in values)
        return f"rng.choice({json.dumps(values, ensure_ascii=False) if plain else repr(values)})"
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if options:
            return _draw(name, options[0], depth + 1)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    above, below = "exclusiveMinimum" in schema, "exclusiveMaximum" in schema
    if kind == "integer":
        if low is not None:
            low = math.floor(low) + 1 if above else math.ceil(low)
        if high is not None:
            high = math.ceil(high) - 1 if below else math.floor(high)
        low = 1 if low is None else low
        high = max(low, 0) + 998 if high is None else high
        return f"rng.randint({low if low <= high else high - 998}, {high})"
    if kind == "number":
        low = 1.0 if low is None else round(low + 0.01 * above, 4)
        high = max(low, 0.0) + 99.0 if high is None else round(high - 0.01 * below, 4)
        return f"round(rng.uniform({low if low <= high else high - 99.0}, {high}), 2)"
    if kind == "boolean":
        return "rng.random() < 0.5"
    if kind == "array" and depth < 3:
        return f"[{_draw(name, schema.get('items') or {}, depth + 1)} for _ in range(rng.randint(2, 4))]"
    if kind == "object" and depth < 3:
        fields = (schema.get("properties") or {}).items()
        return (
            "{" + ", ".join(f'"{key}": {_draw(key, part, depth + 1)}' for key, part in fields) + "}"
        )
    words = f"{name} {schema.get('description', '')}".casefold()
    return DATE if re.search(r"\b(date|iso)\b|_date|date_|yyyy", words) else "rng.choice(WORDS)"
