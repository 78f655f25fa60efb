"""What a tool-call parser is, and what the parsers share: reading JSON with errors a model can act on."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl_cli.chat.template_probe import MARK, PROBE_TOOL
from agentrl_cli.types import ToolCall, ToolSchema

MAX_QUOTE = 40
"""Characters of the model's own text that an error message repeats."""
MAX_LITERAL = 20000
"""Characters of a value that is read as a Python literal; a longer one stays text."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """An assistant turn, split. `calls` carry no ids yet."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    thinking: str = ""
    """What was thought, where the syntax has markup of its own for it; in most families it stays in the content."""


class Parser(Protocol):
    """One syntax for tool calls."""

    name: str
    markers: tuple[str, ...]
    """Texts that open, close and structure a call: markup, for the guard."""

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        """Split an assistant turn (no stop token). Never raises; a bad call carries its `error`."""
        ...

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call in this syntax, complete with its markers."""
        ...


def load_parser(name: str) -> Parser:
    """A parser by name, `module:object` or entry point. Raises NotFound with the nearest name."""
    from agentrl_cli.chat.parsers import PARSERS
    from agentrl_cli.registry import resolve

    parser: Parser = resolve("parsers", PARSERS, name)
    return parser


DETECT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("harmony", ("<|channel|>", "functions.")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("gemma3_function", ("<start_function_call>",)),
    ("llama4", ("<|header_start|>", "<|python_start|>")),
    ("llama3_json", ("<|start_header_id|>", "parameters")),
)
"""Parser names and the texts that a chat template for their syntax holds; the first that fits wins. Where it does not
read what the template writes, another that does is taken (`candidates`)."""


def detect_parser(template: str, tokens: Collection[str] = ()) -> str:
    """The parser whose syntax a chat template writes, else the one whose markers are all `tokens`; else hermes.

    `tokens`: texts of a tokenizer's special tokens. Give them for a template that writes no calls: LFM2's lists tools
    and shows results, and its model writes calls between tokens that the template does not name.
    """
    for name, texts in DETECT:
        if all(text in template for text in texts):
            return name
    from agentrl_cli.chat.parsers import PARSERS

    known = (load_parser(name) for name in PARSERS if name not in UNMARKED)
    return next((p.name for p in known if p.markers and all(marker in tokens for marker in p.markers)), "hermes")


def reads(parser: Parser, written: str) -> bool:
    """Whether a parser reads a turn in which a template called the tool `probe`."""
    calls = parser.parse(written, [PROBE_TOOL]).calls
    return [(one.name, one.arguments, one.error) for one in calls] == [("probe", {"x": MARK}, None)]


UNMARKED = ("llama3_json", "llama3_pythonic", "llama4", "functionary_v32")
"""Syntaxes that need no marker: the whole turn is the call."""


def candidates(written: str) -> list[Parser]:
    """The parsers whose markers a turn with a call holds, and those that have none."""
    from agentrl_cli.chat.parsers import PARSERS

    every = [load_parser(name) for name in PARSERS]
    return [p for p in every if p.name in UNMARKED or any(marker in written for marker in p.markers)]


def call(name: str = "", arguments: dict[str, Any] | None = None, *, raw: str, error: str | None = None) -> ToolCall:
    """A call without an id, which `Chat.parse` gives."""
    return ToolCall(id="", name=name, arguments=arguments, raw=raw, error=error)


def read_json(text: str) -> tuple[Any, str | None]:
    """A strict JSON value, or what is wrong with it.

    Strict because the servers that run trained models are: a raw line break inside a string is an error here too.
    """
    try:
        return json.loads(text, parse_constant=_no_constant), None
    except json.JSONDecodeError as error:
        return None, _json_error(text, error)
    except (ValueError, RecursionError) as error:
        return None, f"not valid JSON: {error}"


def read_call(raw: str, keys: Sequence[str] = ("arguments",)) -> ToolCall:
    """A call written as one JSON object `{"name": …, "arguments": {…}}`; `keys` names the arguments' field."""
    value, error = read_json(raw.strip())
    if error:
        found = re.search(r'"name"\s*:\s*"([^"\\]{1,64})"', raw)
        return call(found.group(1) if found else "", raw=raw, error=error)
    return call_of(value, raw, keys)


def call_of(value: Any, raw: str, keys: Sequence[str] = ("arguments",), named: str = "name") -> ToolCall:
    """A call from a JSON value, with the first thing that is wrong with its shape. `named` is the name's field."""
    if not isinstance(value, dict):
        return call(raw=raw, error=f'must be a JSON object with "{named}" and "{keys[0]}", not {kind(value)}')
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
    """A call whose name is known and whose arguments are one JSON object; `id_` where the model wrote one."""
    value, error = read_json(text.strip())
    if not error and not isinstance(value, dict):
        error = f"the arguments must be a JSON object, not {kind(value)}"
    return ToolCall(id_, name, None if error else value, raw, error)


def typed_value(text: str, tools: Sequence[ToolSchema], name: str, key: str) -> Any:
    """The value of an argument written as bare text: a string where the schema says so, else JSON where it reads.

    Where it does not read, the text itself: the check of arguments then says what type was wanted.
    """
    function: Mapping[str, Any] = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    return typed_as(text, function.get("parameters", {}).get("properties", {}).get(key, {}))


def typed_as(text: str, schema: Mapping[str, Any]) -> Any:
    """A value written as bare text, of the type that its schema says; see `typed_value`."""
    if schema.get("type") == "string":
        return text
    value, error = read_json(text.strip())
    return _python_value(text) if error else value


def _python_value(text: str) -> Any:
    """What a template's own `string` filter makes of a constant, a list or an object; else the text itself."""
    bare = text.strip()
    if bare not in ("True", "False", "None") and not (bare[:1] in "[{" and len(bare) < MAX_LITERAL):
        return text
    try:
        return ast.literal_eval(bare)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def kind(value: Any) -> str:
    """The JSON name of a value's type, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names: tuple[tuple[type, str], ...] = (
        (str, "a string"), (int, "an integer"), (float, "a number"), (list, "an array"), (dict, "an object"),
    )  # fmt: skip
    return next((name for type_, name in names if isinstance(value, type_)), type(value).__name__)


def _json_error(text: str, error: json.JSONDecodeError) -> str:
    if not text:
        return "empty: there is no JSON object"
    if error.msg.startswith("Invalid control character"):
        return r"not valid JSON: a line break or tab inside a string must be written \n or \t"
    where = text[max(0, error.pos - MAX_QUOTE // 2) : error.pos + MAX_QUOTE // 2]
    if error.pos >= len(text):
        return f"not valid JSON: {error.msg} at its end, after {where!r}"
    return f"not valid JSON: {error.msg} at character {error.pos + 1}, near {where!r}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
