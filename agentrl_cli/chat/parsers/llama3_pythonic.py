"""Llama 3.2 and 4, pythonic: the whole turn is a Python list of calls, `[f(x=1), g(y="a")]`; LFM2 puts it in markers.

Read as a syntax tree, never run; arguments are keywords with literal values, JSON's `true`, `false`, `null` included.
LFM2's template escapes nothing between its quotes: what is no valid Python for that is read by its commas.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call
from agentrl_cli.chat.parsers.blocks import MOST_ARGUMENTS
from agentrl_cli.types import ToolCall, ToolSchema

START, END = "<|python_start|>", "<|python_end|>"
LFM_START, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
MAX_LENGTH = 20000
"""Characters; a longer turn is no list of calls."""
MOST_CALLS = 100
"""Of one list: finding the text of each takes a walk through all of it."""
JSON_NAMES = {"true": True, "false": False, "null": None}
UNESCAPED = re.compile(r"\b(\w+)='(.*?)'(?=, \w+=|\)(?:, [\w.]+\(|\]$))", re.DOTALL)


class Llama3PythonicParser:
    """`[f(x=1), g(y="a")]`"""

    name = "llama3_pythonic"
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
    markers: tuple[str, ...] = (LFM_START, LFM_END)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        before, *blocks = text.split(LFM_START)
        if not blocks:
            if LFM_END in text:
                return ParsedText(text, (call(raw=text, error=f"{LFM_END} without {LFM_START} before it"),))
            return ParsedText(text)
        calls: list[ToolCall] = []
        loose = [before.rstrip("\n")]
        for block in blocks:
            raw, closed, after = block.partition(LFM_END)
            if closed:
                calls += read_list(raw.strip(), unescaped=True)
            else:
                name = re.match(r"\s*\[\s*([\w.]+)", raw)
                why = f"cut off: no {LFM_END} before the turn ended"
                calls.append(call(name[1] if name else "", raw=raw, error=why))
            loose.append(after.strip("\n"))
        return ParsedText("\n".join(part for part in loose if part), tuple(calls))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        shown = {k: repr(v) if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        return f"{LFM_START}[{name}({', '.join(f'{key}={value}' for key, value in shown.items())})]{LFM_END}"


def read_list(body: str, unescaped: bool = False) -> tuple[ToolCall, ...]:
    """The calls of a list. `unescaped`: texts may hold quotes and line breaks as they are."""
    try:
        tree = ast.parse(body[:MAX_LENGTH], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if unescaped and body.count("='") <= MOST_ARGUMENTS and (escaped := UNESCAPED.sub(_escaped, body)) != body:
            return read_list(escaped)
        name = re.match(r"\[\s*([\w.]+)", body)
        what = getattr(error, "msg", None) or str(error)
        return (call(name.group(1) if name else "", raw=body, error=f"not valid Python: {what}"),)
    if not isinstance(tree, ast.List):
        return (call(raw=body, error="must be one list of calls"),)
    if not tree.elts:
        return (call(raw=body, error="the list of calls is empty"),)
    if len(tree.elts) > MOST_CALLS:
        return (call(raw=body, error=f"more than {MOST_CALLS} calls"),)
    return tuple(_read(item, body) for item in tree.elts)


def _escaped(found: re.Match[str]) -> str:
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
        return call(name, raw=raw, error="arguments must be plain values: text, numbers, lists, dicts")
    return call(name, values, raw=raw)


class _Constants(ast.NodeTransformer):
    """JSON's names for constants as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(JSON_NAMES[node.id]), node) if node.id in JSON_NAMES else node


PARSER = Llama3PythonicParser()
LFM2 = LFM2Parser()
