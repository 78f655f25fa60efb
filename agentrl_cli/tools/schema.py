"""An OpenAI function schema from a typed function with a Google docstring."""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from agentrl_cli.errors import ConfigError
from agentrl_cli.types import ToolSchema

SIMPLE: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def tool_schema(function: Callable[..., Any], *, name: str = "", hidden: Sequence[str] = ()) -> ToolSchema:
    """The schema of a function: name, first paragraph of its docstring, typed parameters with their `Args:` texts.

    Parameters without a default are required. `hidden` parameters, `self` and those of type ToolContext are not
    shown to the model. Raises ConfigError where a type or the description is missing.
    """
    name = name or getattr(function, "__name__", "")
    description, texts = docstring_parts(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"Tool {name} has no docstring.", hint="Its first paragraph tells the model what it does.")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"Tool {name} has a type that cannot be resolved: {error}.") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in visible_parameters(function, hints, hidden):
        if parameter.name not in hints:
            raise ConfigError(
                f"Tool {name}: parameter {parameter.name} has no type.", hint=f"Write {parameter.name}: str, say."
            )
        schema = type_schema(hints[parameter.name], f"tool {name}, parameter {parameter.name}")
        text = texts.get(parameter.name)
        properties[parameter.name] = {**schema, "description": text} if text else schema
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def visible_parameters(
    function: Callable[..., Any], hints: Mapping[str, Any], hidden: Sequence[str] = ()
) -> list[inspect.Parameter]:
    """The parameters that a model fills in."""
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in {"self", *hidden}
        and not is_context(hints.get(parameter.name))
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]


def is_context(hint: Any) -> bool:
    """True for the ToolContext type, which is injected."""
    return getattr(hint, "__name__", "") == "ToolContext"


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON Schema of a type hint. Raises ConfigError for one that JSON cannot carry."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if origin is typing.Annotated:
        text = next((extra for extra in args[1:] if isinstance(extra, str)), None)
        return {**type_schema(args[0], where), **({"description": text} if text else {})}
    if origin is Literal:
        return _enum(list(args))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum([member.value for member in hint])
    if origin in {Union, types.UnionType}:
        return _union(args, where)
    if hint in {list, tuple, set} or origin in {list, tuple, set, Sequence}:
        items = type_schema(args[0], where) if args else {}
        return {"type": "array", **({"items": items} if items else {})}
    if hint is dict or origin in {dict, Mapping}:
        values = type_schema(args[1], where) if args else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if typing.is_typeddict(hint):
        fields = typing.get_type_hints(hint)
        properties = {name: type_schema(field, where) for name, field in fields.items()}
        return {"type": "object", "properties": properties, "required": sorted(hint.__required_keys__)}
    raise ConfigError(
        f"The type {hint!r} of {where} cannot be written as JSON.",
        hint="Use str, int, float, bool, list, dict, Literal, Optional or TypedDict.",
    )


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph of a Google docstring, on one line, and the texts of its `Args:`."""
    end = r"\n\s*\n|\n\s*(?:Args|Arguments|Parameters|Returns|Raises|Examples?):"
    head = re.split(end, text.strip(), maxsplit=1)[0]
    section = re.search(r"^\s*(?:Args|Arguments|Parameters):\s*\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    texts: dict[str, str] = {}
    indent: int | None = None
    current = ""
    for line in (section.group(1) if section else "").splitlines():
        depth = len(line) - len(line.lstrip())
        match = re.match(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)", line)
        if match and (indent is None or depth <= indent):
            indent, current = depth, match.group(1)
            texts[current] = match.group(2).strip()
        elif current and line.strip():
            texts[current] = f"{texts[current]} {line.strip()}".strip()
    return " ".join(head.split()), texts


def _enum(values: list[Any]) -> dict[str, Any]:
    kinds = {SIMPLE.get(type(value)) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {**({"type": kind} if kind else {}), "enum": values}


def _union(args: tuple[Any, ...], where: str) -> dict[str, Any]:
    options = [type_schema(arg, where) for arg in args]
    if all(set(option) == {"type"} for option in options):
        kinds = [option["type"] for option in options]
        return {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {"anyOf": options}
