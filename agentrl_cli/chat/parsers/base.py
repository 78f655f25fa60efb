"""The parser protocol, and what parsers share: calls and values read from text, with errors a model can act on.

`parse_blocks` splits a turn into blocks between an opening and a closing marker, as most syntaxes write their calls.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentrl_cli.types import ToolCall, ToolSchema
from agentrl_cli.types.plain import describe_json_error

MAX_QUOTE = 40
"""Characters of the model's own text that an error message repeats."""
MAX_LITERAL = 20000
"""Characters of a value that is read as a Python literal; a longer one stays text."""
TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
MOST_ARGUMENTS = 200
"""Maximum arguments of a call that writes them as tags."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """An assistant turn, split. `calls` carry no ids yet."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    thinking: str = ""
    """The model's thinking, if the syntax has markup of its own for it; in most families it stays in the content."""


class Parser(Protocol):
    """One syntax for tool calls."""

    name: str
    markers: tuple[str, ...]
    """Texts that open, close and structure a call. In a user's or a tool's text they are escaped (`escaping.py`)."""

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        """Split an assistant turn (no stop token). Never raises; a bad call carries its `error`."""

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call in this syntax, complete with its markers."""


def call(
    name: str = "", arguments: dict[str, Any] | None = None, *, raw: str, error: str | None = None
) -> ToolCall:
    """Return a call without an id; `parse_text` assigns it."""
    return ToolCall(id="", name=name, arguments=arguments, raw=raw, error=error)


def read_json(text: str) -> tuple[Any, str | None]:
    """Return a strict JSON value and None, or None and the fault of the text.

    Strict because the servers that run trained models are: a raw line break inside a string is an error here too.
    """
    try:
        return json.loads(text, parse_constant=no_constant), None
    except json.JSONDecodeError as error:
        return None, _json_error(text, error)
    except (ValueError, RecursionError) as error:
        return None, f"not valid JSON: {error}"


def read_call(
    raw: str, tools: Sequence[ToolSchema] = (), *, keys: Sequence[str] = ("arguments",)
) -> ToolCall:
    """Return a call written as one JSON object `{"name": …, "arguments": {…}}`; `keys` names the arguments' field."""
    value, error = read_json(raw.strip())
    if error:
        return unreadable(raw, error)
    return call_of(value, raw, keys)


def unreadable(raw: str, error: str, key: str = "name") -> ToolCall:
    """Return a call whose JSON cannot be read, with its name if that can be found.

    `key` is the name's field; empty if the name itself is the first key.
    """
    found = re.search((rf'"{key}"\s*:' if key else r"\{") + r'\s*"([^"\\]{1,64})"', raw)
    return call(found[1] if found else "", raw=raw, error=error)


def call_of(
    value: Any, raw: str, keys: Sequence[str] = ("arguments",), named: str = "name"
) -> ToolCall:
    """Return a call from a JSON value, with the first thing that is wrong with its shape.

    `named` is the name's field.
    """
    if not isinstance(value, dict):
        return call(
            raw=raw,
            error=f'must be a JSON object with "{named}" and "{keys[0]}", not {kind(value)}',
        )
    name = value.get(named)
    if named not in value:
        return call(raw=raw, error=f'"{named}" is missing')
    if not isinstance(name, str) or not name:
        return call(raw=raw, error=f'"{named}" must be a non-empty string, not {kind(name)}')
    key = next((key for key in keys if key in value), None)
    if key is None:
        return call(name, raw=raw, error=f'"{keys[0]}" is missing')
    arguments = value[key]
    if not isinstance(arguments, dict):
        return call(name, raw=raw, error=f'"{key}" must be a JSON object, not {kind(arguments)}')
    return call(name, arguments, raw=raw)


def call_with(name: str, text: str, raw: str, id_: str = "") -> ToolCall:
    """Return a call whose name is known and whose arguments are one JSON object; `id_` if the model wrote one."""
    value, error = read_json(text.strip())
    if not error and not isinstance(value, dict):
        error = f"the arguments must be a JSON object, not {kind(value)}"
    return ToolCall(id_, name, None if error else value, raw, error)


def typed_value(text: str, tools: Sequence[ToolSchema], name: str, key: str) -> Any:
    """Return the value of an argument written as bare text: a string if the schema wants one, else its JSON value.

    If it is not valid JSON, the text itself: validation then reports which type was wanted.
    """
    function: Mapping[str, Any] = next(
        (tool["function"] for tool in tools if tool["function"]["name"] == name), {}
    )
    return typed_as(text, function.get("parameters", {}).get("properties", {}).get(key, {}))


def typed_as(text: str, schema: Mapping[str, Any] | bool) -> Any:
    """Return a value written as bare text, with the type of its schema; see `typed_value`.

    If a string is one of several types, the text is one unless its value has another of them.
    """
    if not isinstance(schema, Mapping):  # true: anything
        return _read_bare(text)
    options = schema.get("enum")
    if schema.get("type") == "string" or (isinstance(options, list) and text in options):
        return text
    types, value = _list_types(schema), _read_bare(text)
    own = (kind(value).split()[-1], "number" if type(value) is int else "")
    return text if "string" in types and not any(name in types for name in own) else value


def _list_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types among which a schema lets a call choose; empty if some of them are not JSON's."""
    options = schema.get("anyOf") or ()
    types = schema.get("type") or [isinstance(o, Mapping) and o.get("type") for o in options]
    return types if isinstance(types, list) and all(name in TYPES for name in types) else []


def _read_bare(text: str) -> Any:
    """Return the JSON value of a text, or the one that Python's literal stands for, else the text."""
    bare = text.strip()
    value, error = read_json(bare)
    if not error:
        return value
    # A template's `string` filter writes Python's constants, lists and dicts.
    if bare in ("True", "False", "None") or (bare[:1] in "[{" and len(bare) < MAX_LITERAL):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return ast.literal_eval(bare)
    return text


def kind(value: Any) -> str:
    """Return the JSON name of a value's type, with its article."""
    names: tuple[tuple[type, str], ...] = (
        (type(None), "null"), (bool, "a boolean"), (str, "a string"), (int, "an integer"), (float, "a number"),
        (list, "an array"), (dict, "an object"),
    )  # fmt: skip
    return next((name for type_, name in names if isinstance(value, type_)), type(value).__name__)


def _json_error(text: str, error: json.JSONDecodeError) -> str:
    if not text:
        return "empty: a JSON object is missing"
    if error.msg.startswith("Invalid control character"):
        return r"not valid JSON: a line break or tab inside a string must be written \n or \t"
    where = text[max(0, error.pos - MAX_QUOTE // 2) : error.pos + MAX_QUOTE // 2]
    found = f"not valid JSON: {describe_json_error(error)}"
    if error.pos >= len(text):
        return f"{found} at its end, after {where!r}"
    return f"{found} at character {error.pos + 1}, near {where!r}"


def no_constant(name: str) -> None:
    """Raise ValueError for a constant that `json` takes and JSON does not have."""
    raise ValueError(f"{name} is not a JSON value")


Markers = tuple[str, str]
"""Opening and closing text."""
Read = Callable[[str, Sequence[ToolSchema]], ToolCall | Sequence[ToolCall]]
"""Makes the call, or several, of the text between two markers; `tools` say of which type bare texts are."""


@dataclass
class BlockParser:
    """A syntax with every call between the markers `block`, inside sections if `section` is given."""

    name: str
    block: Markers
    write: Callable[[str, Mapping[str, Any]], str]
    """Writes a call of a name and arguments, complete with its markers."""
    read: Read = read_call
    section: Markers | None = None
    inner: tuple[str, ...] = ()
    """Further markers, inside a block."""
    around: tuple[str, ...] = ()
    """Markers beside the blocks and around an answer, which are not content."""
    thought: re.Pattern[str] | None = None
    """The model's thinking, where calls do not count, if the syntax has markup of its own for it."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*(self.section or ()), *self.block, *self.inner, *self.around)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        thoughts: list[str] = []
        if self.thought:
            thoughts = [part for found in self.thought.findall(text) if (part := found.strip())]
            text = self.thought.sub("", text)
        found = parse_blocks(text, self.block, self.read, self.section, tools)
        content = found.content
        if any(marker in content for marker in self.around):
            content = re.sub("|".join(map(re.escape, self.around)), "", content)
            content = content.rstrip("\n") if found.calls else content
        return ParsedText(content, found.calls, "\n".join(thoughts))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.write(name, arguments)


def parse_blocks(
    text: str,
    block: Markers,
    read: Read,
    section: Markers | None = None,
    tools: Sequence[ToolSchema] = (),
) -> ParsedText:
    """Return the content, and the calls of every block; one that is not closed, or never opened, is an error.

    Text before, between and after the blocks is content. With a `section` the blocks are inside sections, which have
    markers of their own; without any section they are read too.
    """
    if section is None or section[0] not in text:
        return _split_blocks(text, block, read, tools)
    content, opened, rest = text.partition(section[0])
    calls: list[ToolCall] = []
    loose = [content.rstrip("\n")]
    while opened:  # a loop, not recursion: a model that repeats itself opens thousands
        inner, closed, after = rest.partition(section[1])
        found = list(_split_blocks(inner, block, read, tools).calls)
        found = found or [call(raw=inner, error=f"no {block[0]} in the list of calls")]
        if not closed and not found[-1].error:
            found[-1] = replace(
                found[-1], arguments=None, error=f"cut off: no {section[1]} at its end"
            )
        calls += found
        content, opened, rest = after.partition(section[0])
        loose.append(content.strip("\n"))
    return ParsedText("\n".join(part for part in loose if part), tuple(calls))


def _split_blocks(text: str, block: Markers, read: Read, tools: Sequence[ToolSchema]) -> ParsedText:
    opening, closing = block
    before, *blocks = text.split(opening)
    if not blocks:
        return ParsedText(text, find_unopened(text, block))
    calls: list[ToolCall] = []
    loose = [before.rstrip("\n")]
    for number, inner in enumerate(blocks):
        raw, closed, after = inner.partition(closing)
        made = read(raw, tools)
        found = [made] if isinstance(made, ToolCall) else list(made)
        if not closed:
            where = (
                "before the turn ended"
                if number == len(blocks) - 1
                else f"before the next {opening}"
            )
            error = f"cut off: no {closing} {where}"
            found = [replace(found[0], arguments=None, raw=raw, error=error)]
        calls += found
        loose.append(after.strip("\n"))
    return ParsedText("\n".join(part for part in loose if part), tuple(calls))


def find_unopened(text: str, block: Markers) -> tuple[ToolCall, ...]:
    """Return the error for a text without the opening marker that contains the closing one; empty if it does not."""
    opening, closing = block
    return (
        (call(raw=text, error=f"{closing} without {opening} before it"),) if closing in text else ()
    )
