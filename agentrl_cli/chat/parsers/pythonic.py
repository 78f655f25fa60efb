"""Calls as a Python list, `[f(x=1), g(y="a")]` (Llama 3.2 and 4, LFM2), and Llama's calls as JSON.

A list is parsed as a syntax tree, never executed; arguments are keywords with literal values, JSON's `true`, `false`
and `null` included. LFM2's template escapes nothing between its quotes: a list that is not valid Python for that
reason is split at its commas.

In Llama's JSON the whole turn is `{"name": …, "parameters": {…}}`, several separated by semicolons. Llama 3 requires
no markers (`<|python_tag|>` is optional), so a turn counts as a call if it starts as one: with the tag, or with a JSON
object that has a "name". Any other JSON is an answer. Llama 4 writes these or a Python list; text before the calls
stands between `<|python_start|>` and `<|python_end|>`, and so may a list.
https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import (
    MOST_ARGUMENTS,
    BlockParser,
    ParsedText,
    call,
    call_of,
    read_call,
)
from agentrl_cli.types import ToolCall, ToolSchema

START, END = "<|python_start|>", "<|python_end|>"
MAX_LENGTH = 20000
"""Characters; a longer turn is not a list of calls."""
MOST_CALLS = 100
"""Maximum calls of one list: finding the text of each takes a walk through all of it."""
JSON_NAMES = {"true": True, "false": False, "null": None}
UNESCAPED = re.compile(r"\b(\w+)='(.*?)'(?=, \w+=|\)(?:, [\w.]+\(|\]$))", re.DOTALL)


class PythonicParser:
    """`[f(x=1), g(y="a")]` is the whole turn."""

    name = "llama3_pythonic"
    unmarked = True
    markers: tuple[str, ...] = (START, END, "<|python_tag|>")

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        body = re.sub(r"<\|python_(?:start|end|tag)\|>", "", text).strip()
        if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body):
            return ParsedText(text)
        return ParsedText("", read_list(body))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def _write_lfm2(name: str, arguments: Mapping[str, Any]) -> str:
    texts = ", ".join(
        f"{key}={repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in arguments.items()
    )
    return f"<|tool_call_start|>[{name}({texts})]<|tool_call_end|>"


def read_list(
    raw: str, tools: Sequence[ToolSchema] = (), *, unescaped: bool = False
) -> tuple[ToolCall, ...]:
    """Return the calls of a list. `unescaped`: texts may contain quotes and line breaks as they are."""
    body = raw.strip()
    try:
        tree = ast.parse(body[:MAX_LENGTH], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if (
            unescaped
            and body.count("='") <= MOST_ARGUMENTS
            and (escaped := UNESCAPED.sub(lambda one: f"{one[1]}={one[2]!r}", body)) != body
        ):
            return read_list(escaped)
        name = re.match(r"\[\s*([\w.]+)", body)
        reason = getattr(error, "msg", None) or str(error)
        return (call(name[1] if name else "", raw=body, error=f"not valid Python: {reason}"),)
    if not isinstance(tree, ast.List):
        return (call(raw=body, error="must be one list of calls"),)
    if not tree.elts:
        return (call(raw=body, error="the list of calls is empty"),)
    if len(tree.elts) > MOST_CALLS:
        return (call(raw=body, error=f"more than {MOST_CALLS} calls"),)
    return tuple(_read(item, body) for item in tree.elts)


def _read(node: ast.expr, body: str) -> ToolCall:
    raw = ast.get_source_segment(body, node) or body
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
        return call(raw=raw, error=f"{raw[:40]!r} is not a call")
    try:
        name = ast.unparse(node.func)
    except RecursionError:
        return call(raw=raw, error=f"{raw[:40]!r} is not a call")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return call(name, raw=raw, error="arguments must be written with their names, name=value")
    try:
        values = {str(k.arg): ast.literal_eval(_Constants().visit(k.value)) for k in node.keywords}
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return call(
            name, raw=raw, error="arguments must be plain values: text, numbers, lists, dicts"
        )
    return call(name, values, raw=raw)


class _Constants(ast.NodeTransformer):
    """Replaces JSON's names of constants with Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return (
            ast.copy_location(ast.Constant(JSON_NAMES[node.id]), node)
            if node.id in JSON_NAMES
            else node
        )


LLAMA3_PYTHONIC = PythonicParser()
LFM2 = BlockParser(
    "lfm2",
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    _write_lfm2,
    partial(read_list, unescaped=True),
)
"""`<|tool_call_start|>[f(x=1), g(y='a')]<|tool_call_end|>`, text before and after."""


TAG = "<|python_tag|>"
KEYS = ("parameters", "arguments")
BEGIN = re.compile(r"\s*\{\s*\"(?:name|type|function|parameters|arguments)\"")
SEPARATOR = re.compile(r"[\s;]*")
BEFORE = re.compile(rf"\s*{re.escape(START)}(.*?){re.escape(END)}(?=\s*\{{)", re.DOTALL)


class Llama3JSONParser:
    """`{"name": "f", "parameters": {…}}`"""

    name = "llama3_json"
    unmarked = True
    markers: tuple[str, ...] = (TAG,)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        content, tagged, body = text.partition(TAG)
        if tagged:
            return ParsedText(content.rstrip("\n"), tuple(_read_all(body)))
        return ParsedText("", tuple(_read_all(text))) if BEGIN.match(text) else ParsedText(text)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "parameters": dict(arguments)}, ensure_ascii=False)


class Llama4Parser(Llama3JSONParser):
    """`[f(x=1)]`, or `<|python_start|>text<|python_end|>{"name": "f", "parameters": {…}}`"""

    name = "llama4"
    markers: tuple[str, ...] = (START, END)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        found = LLAMA3_PYTHONIC.parse(text, tools)
        if found.calls:
            return found
        before = BEFORE.match(text)
        found = super().parse(text[before.end() :] if before else text, tools)
        if not found.calls:
            return ParsedText(text)
        return ParsedText(before[1] if before else found.content, found.calls)


def _read_all(text: str) -> list[ToolCall]:
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    position = 0
    text = text.strip()
    while position < len(text):
        try:
            value, end = decoder.raw_decode(text, position)
        except (
            ValueError,
            RecursionError,
        ):  # ValueError: not JSON, or a number of thousands of digits
            return [*calls, read_call(text[position:], keys=KEYS)]
        calls.append(call_of(value, text[position:end], KEYS))
        separator = SEPARATOR.match(text, end)
        position = separator.end() if separator else end
    return calls or [call(raw=text, error=f"nothing follows {TAG}")]


LLAMA3_JSON = Llama3JSONParser()
LLAMA4 = Llama4Parser()
