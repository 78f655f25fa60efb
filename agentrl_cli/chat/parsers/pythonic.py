"""Calls as a Python list, `[f(x=1), g(y="a")]`: Llama 3.2 and 4 as the whole turn, LFM2 between markers.

Parsed as a syntax tree, never executed; arguments are keywords with literal values, JSON's `true`, `false` and `null`
included. LFM2's template escapes nothing between its quotes: a list that is not valid Python for that reason is split
at its commas.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import MOST_ARGUMENTS, ParsedText, call
from agentrl_cli.chat.parsers.blocks import parse_blocks
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


class LFM2Parser:
    """`<|tool_call_start|>[f(x=1), g(y='a')]<|tool_call_end|>`, text before and after."""

    name = "lfm2"
    markers: tuple[str, ...] = ("<|tool_call_start|>", "<|tool_call_end|>")

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        block = (self.markers[0], self.markers[1])
        return parse_blocks(text, block, lambda raw: read_list(raw.strip(), unescaped=True))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {
            k: repr(v) if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
            for k, v in arguments.items()
        }
        call = f"[{name}({', '.join(f'{key}={value}' for key, value in texts.items())})]"
        return f"{self.markers[0]}{call}{self.markers[1]}"


def read_list(body: str, unescaped: bool = False) -> tuple[ToolCall, ...]:
    """Return the calls of a list. `unescaped`: texts may contain quotes and line breaks as they are."""
    try:
        tree = ast.parse(body[:MAX_LENGTH], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if (
            unescaped
            and body.count("='") <= MOST_ARGUMENTS
            and (escaped := UNESCAPED.sub(_escape, body)) != body
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


def _escape(found: re.Match[str]) -> str:
    return f"{found[1]}={found[2]!r}"


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
LFM2 = LFM2Parser()
