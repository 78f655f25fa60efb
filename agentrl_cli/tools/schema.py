"""An OpenAI function schema from a typed function with a Google docstring."""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from pydantic import Field, PydanticUserError, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from typing_extensions import TypedDict

from agentrl_cli.errors import ConfigError
from agentrl_cli.types import ToolSchema


def tool_schema(
    function: Callable[..., Any], *, name: str = "", hidden: Sequence[str] = ()
) -> ToolSchema:
    """Return the schema of a function: name, first paragraph of its docstring, typed parameters with their `Args:`
    texts.

    Parameters without a default are required. `hidden` parameters, `self` and those of type ToolContext are not
    shown to the model. Raises ConfigError if a type or the description is missing, and for `*args` and `**options`.
    """
    name = name or getattr(function, "__name__", "")
    description, texts = docstring_parts(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(
            f"Tool {name} has no docstring.",
            hint="Its first paragraph describes the tool to the model.",
        )
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"Tool {name} has a type that cannot be resolved: {error}.") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in visible_parameters(function, hints, hidden):
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            raise ConfigError(
                f"Tool {name}: a model cannot fill in {str(parameter).partition(':')[0]}, which has no names.",
                hint="Write each parameter with its name and type; a list is one: values: list[float].",
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"Tool {name}: parameter {parameter.name} has no type.",
                hint=f"E.g. {parameter.name}: str.",
            )
        schema = type_schema(hints[parameter.name], f"tool {name}, parameter {parameter.name}")
        text = texts.get(parameter.name)
        properties[parameter.name] = {**schema, "description": text} if text else schema
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def visible_parameters(
    function: Callable[..., Any], hints: Mapping[str, Any], hidden: Sequence[str] = ()
) -> list[inspect.Parameter]:
    """Return the parameters that a model fills in."""
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in {"self", *hidden} and not is_context(hints.get(parameter.name))
    ]


def is_context(hint: Any) -> bool:
    """Whether a hint is the ToolContext type, which is injected."""
    return getattr(hint, "__name__", "") == "ToolContext"


CARRIED = frozenset(
    "any none bool int float str literal nullable union default list set tuple dict json-or-python "
    "typed-dict typed-dict-field definitions definition-ref".split()
)
"""pydantic's names of the kinds of types that JSON carries as they are. A date would reach the function as a text."""


class _JsonSchema(GenerateJsonSchema):
    """pydantic's generator, for types that JSON carries."""

    def build_schema_type_to_method(self) -> dict[Any, Callable[[Any], JsonSchemaValue]]:
        methods = super().build_schema_type_to_method()
        return {
            kind: method if kind in CARRIED else self._refuse for kind, method in methods.items()
        }

    def _refuse(self, schema: Any) -> JsonSchemaValue:
        return self.handle_invalid_for_json_schema(schema, schema["type"])


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON Schema of a type hint. Raises ConfigError for one that JSON cannot carry."""
    try:
        made = TypeAdapter(_readable(hint)).json_schema(schema_generator=_JsonSchema)
        return _plain(made, made.get("$defs", {}))
    except (PydanticUserError, NameError, RecursionError) as error:
        raise ConfigError(
            f"The type {hint!r} of {where} cannot be written as JSON.",
            hint="Use str, int, float, bool, list, dict, Literal, Optional or TypedDict.",
        ) from error


def _readable(hint: Any) -> Any:
    """Return the hint as pydantic reads it.

    A text in `Annotated[int, "A count."]` is a description. An enum is its values, since its docstring is for
    programmers. A TypedDict is that of typing_extensions: before Python 3.12 pydantic takes no other.
    """
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(member.value for member in hint)]
    if typing.is_typeddict(hint):
        fields = {
            name: _readable(field)
            for name, field in typing.get_type_hints(hint, include_extras=True).items()
        }
        for name, field in fields.items():
            if get_origin(field) not in {Required, NotRequired}:
                fields[name] = (
                    Required[field] if name in hint.__required_keys__ else NotRequired[field]
                )
        return TypedDict(hint.__name__, fields)  # type: ignore[operator]  # made at run time
    if origin is Annotated:
        text = next((extra for extra in args[1:] if isinstance(extra, str)), None)
        return Annotated[
            _readable(args[0]),
            Field(description=text),
            *(e for e in args[1:] if not isinstance(e, str)),
        ]
    if origin is Literal or not args:
        return hint
    inner = tuple(map(_readable, args))
    origin = Union if origin is types.UnionType else origin
    return origin[inner if len(inner) > 1 else inner[0]]


def _plain(made: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return pydantic's schema as models see it: without titles and references, and as short as it can be.

    Trained models know this form to the byte: change nothing in it, the order of the keys included.
    """
    schema: dict[str, Any] = {}
    if "$ref" in made:
        schema = _plain(definitions[made["$ref"].rpartition("/")[2]], definitions)
    for key, value in made.items():
        if key in {"items", "additionalProperties"}:
            inner = _plain(value, definitions) if isinstance(value, Mapping) else value
            schema |= {key: inner} if inner not in ({}, True) else {}
        elif key == "properties":
            schema[key] = {name: _plain(field, definitions) for name, field in value.items()}
            schema["required"] = sorted(made.get("required", ()))
        elif key in {"anyOf", "prefixItems"}:
            schema[key] = [_plain(option, definitions) for option in value]
        elif key == "const":
            schema["enum"] = [value]
        elif key not in {"$defs", "$ref", "default", "required", "title", "uniqueItems"}:
            schema[key] = value
    if all(set(option) == {"type"} for option in schema.get("anyOf", [{}])):
        schema["type"] = [option["type"] for option in schema.pop("anyOf")]
    return {
        key: schema[key]
        for key in sorted(schema, key=lambda key: (key != "type", key == "description", key))
    }


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a Google docstring, on one line, and the texts of its `Args:`."""
    end = r"\n\s*\n|\n\s*(?:Args|Arguments|Parameters|Returns|Raises|Examples?):"
    head = re.split(end, text.strip(), maxsplit=1)[0]
    section = re.search(
        r"^\s*(?:Args|Arguments|Parameters):\s*\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL
    )
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
