"""The text of an assistant turn to a message with tool calls. A call that cannot be executed carries its error.

A bad call never ends an episode: its `error`, with the form that is expected, becomes the observation. Calls inside
the model's thinking do not count.

`jsonschema` validates a call's arguments; this module chooses the first error in the order of the arguments and words
it. Stricter than the standard in two places: an argument that the schema does not name is an error (the answer
suggests the nearest name) unless `additionalProperties` allows it, and `3.0` is not an integer. Nothing is fetched: a
`$ref` to an address cannot be resolved.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from agentrl_cli.chat.parsers import Parser, all_parsers, candidates, is_unmarked
from agentrl_cli.chat.parsers.base import TYPES, kind
from agentrl_cli.chat.thinking import THINK, THINK_END
from agentrl_cli.errors import nearest
from agentrl_cli.types import Message, ToolCall, ToolSchema
from agentrl_cli.types.plain import is_text

if TYPE_CHECKING:
    from jsonschema import ValidationError

log = logging.getLogger(__name__)

EXAMPLES = {"integer": 0, "number": 0, "boolean": True, "array": [], "object": {}, "null": None}
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
COMBINES = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}
"""Keywords of a schema that take in other schemas, with properties of their own."""
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
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    parameters = {"type": "object", "properties": {}, **parameters_of(schema)}
    if not COMBINES & set(parameters):  # else others may name further arguments
        parameters = {"additionalProperties": False, **parameters}
    value = dict(arguments)
    try:
        validator = _strict(validator_for(parameters, default=Draft202012Validator))
        # An empty registry: nothing is fetched.
        errors = validator(parameters, registry=Registry()).iter_errors(value)
        found: list[ValidationError] = list(islice(errors, MOST_ERRORS))
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
    found = {}
    for name in names:
        own = properties[name] if isinstance(properties[name], Mapping) else {}  # true: anything
        kinds = own.get("type", "string")
        kind_ = kinds[0] if isinstance(kinds, list) else kinds
        found[name] = (own.get("enum") or [EXAMPLES.get(kind_, "...")])[0]
    return found


@cache
def _report(reason: str) -> None:
    log.warning(
        "The JSON Schema of a tool cannot be used, so its arguments are not checked: %s", reason
    )


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
    path, value, wanted = "", error.instance, error.validator_value
    for part in error.absolute_path:
        path = f"{path}[{part}]" if isinstance(part, int) else _join_path(path, part)
    name = f'argument "{path}"' if path else "the arguments"
    match error.validator:
        case "type":
            names = [wanted] if isinstance(wanted, str) else list(wanted)
            shown, found = _json(value), kind(value)
            found = f"{found} ({shown})" if len(shown) <= 40 else found
            return f"{name} must be {' or '.join(map(_with_article, names))}, not {found}"
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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _with_article(name: str) -> str:
    return "null" if name == "null" else f"{'an' if name[0] in 'aio' else 'a'} {name}"


def _join_path(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


@dataclass(frozen=True, slots=True)
class Parsed:
    """An assistant turn, parsed. The ids that it came from are unchanged."""

    content: str
    """The text without its calls; the whole text if a call was malformed."""
    calls: tuple[ToolCall, ...]
    message: Message
    """The assistant message for the conversation. Malformed calls stay in its content, so that rendering it again
    gives what the model wrote. `reasoning_content` is `thinking`, if any."""
    thinking: str = ""
    """The model's thinking, if the parser's syntax has markup of its own for it (Gemma 4, gpt-oss)."""


def parse_text(
    text: str,
    parser: Parser,
    tools: Sequence[ToolSchema] | None = None,
    turn: int = 0,
    *,
    opened: str = "",
) -> Parsed:
    """Parse an assistant turn (no stop token). With `tools`, names and arguments are checked too. Never raises.

    `opened` is the thinking block that the generation prompt opened. If the turn closes it, the content begins with
    it: the message then contains the whole block, and no template adds an opening.
    """
    if opened and THINK_END in text and THINK not in text.partition(THINK_END)[0]:
        text = opened + text
    thinking, rest = _split_thinking(text)
    found = parser.parse(rest, tools or ())
    own = Counter(call.id for call in found.calls)
    calls = tuple(
        replace(
            _check(call, parser, tools),
            id=call.id if own[call.id] == 1 and call.id else call_id(turn, number),
        )
        for number, call in enumerate(found.calls)
    )
    malformed = any(call.arguments is None for call in calls)
    content = text if malformed else thinking + found.content
    message: Message = {"role": "assistant", "content": content}
    if calls and not malformed:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    if found.thinking and not malformed:
        message["reasoning_content"] = found.thinking
    return Parsed(content, calls, message, found.thinking)


def call_id(turn: int, number: int) -> str:
    """Return nine letters and digits, as Mistral's template wants them; the same for the same place."""
    return f"c{turn % 10000:04d}{number % 10000:04d}"


def foreign_parser(text: str, parsed: Parsed, own: Parser, tools: Sequence[ToolSchema]) -> str:
    """Return the parser that reads calls of a turn in which `own` read none: the model writes another family's syntax.

    `parsed` is the turn as `own` read it. A parser that reads a whole call comes first; if `own` found no call at all,
    one whose markers begin a malformed call counts too. Empty if there is none.
    """
    if not _any_marker().search(text):
        return ""
    others = [p for p in candidates(text) if p.name != own.name and not is_unmarked(p)]
    found = [(parser.name, parse_text(text, parser, tools).calls) for parser in others]
    whole = [name for name, calls in found if any(call.arguments is not None for call in calls)]
    begun = [name for name, calls in found if calls and not parsed.calls]
    return next(iter([*whole, *begun]), "")


@cache
def _any_marker() -> re.Pattern[str]:
    marked = (parser.markers for parser in all_parsers() if not is_unmarked(parser))
    texts = sorted({re.escape(marker) for markers in marked for marker in markers})
    return re.compile("|".join(texts))


def _split_thinking(text: str) -> tuple[str, str]:
    """Return the thinking at the start of a turn with its markers, and the rest.

    Unfinished thinking is all thinking.
    """
    head, mark, tail = text.rpartition(THINK_END)
    if mark:
        body = tail.lstrip("\n")
        return head + mark + tail[: len(tail) - len(body)], body
    if text.lstrip().startswith(THINK):
        return text, ""
    return "", text


def _first_name(text: str, names: Sequence[str]) -> list[str]:
    """Return the name that a text contains first as a word, if any."""
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.findall(rf"(?<!\w)(?:{words})(?!\w)", text)[:1] if names else []


def _find_unwritable(call: ToolCall) -> str | None:
    """Return why a call cannot be written as JSON, as templates and the store do; None if it can."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return r"a \u escape is half of a character: write both halves, or the character itself"
    except (TypeError, ValueError, RecursionError):  # bytes, sets and more of Python's; 1e999
        return "arguments must be plain values: text, finite numbers, lists, objects"
    return None


def _check(call: ToolCall, parser: Parser, tools: Sequence[ToolSchema] | None) -> ToolCall:
    """Return the call with its error, if any: its kind before it, and the expected form after it."""
    schemas = {tool["function"]["name"]: tool for tool in tools or ()}
    if fault := _find_unwritable(call):
        call = replace(
            call, name=call.name if is_text(call.name) else "", arguments=None, error=fault
        )
    error = call.error
    if not error and call.name in schemas:
        error = validate_arguments(schemas[call.name], call.arguments or {})
    if not error and (tools is None or call.name in schemas):
        return call
    known = f"there are: {', '.join(schemas)}" if schemas else "the task has no tools"
    close = nearest(call.name, schemas, n=1)
    if not error:
        error = f'unknown tool "{call.name}"; ' + (f"did you mean {close[0]}?" if close else known)
    # The form is that of the tool that was meant: another one would lead the model there.
    if not close and len(schemas) == 1:
        close = [*schemas]
    elif not close and call.arguments is None:  # else its words are those of its arguments
        close = _first_name(call.raw, [*schemas])
    what = "Malformed tool call" if call.arguments is None else "Bad tool call"
    if call.arguments is None and not close and schemas:
        error = f"{error.removesuffix('.')}; {known}"
    text = f"{what}: {error}" + "." * (not error.endswith("?"))
    if close or call.arguments is None:  # else the syntax was right
        name, arguments = "NAME", dict[str, Any]()
        if close:
            name, arguments = close[0], example_arguments(schemas[close[0]])
        text += f" Expected: {parser.example(name, arguments)}"
    return replace(call, error=text)
