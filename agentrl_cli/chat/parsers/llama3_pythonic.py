"""Llama 3.2 and 4, pythonic: the whole turn is a Python list of calls, `[f(x=1), g(y="a")]`.

Read as a syntax tree, never run; arguments are keywords with literal values.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call
from agentrl_cli.types import ToolCall, ToolSchema

START, END = "<|python_start|>", "<|python_end|>"
MAX_LENGTH = 20000
"""Characters; a longer turn is no list of calls."""


class Llama3PythonicParser:
    """`[f(x=1), g(y="a")]`"""

    name = "llama3_pythonic"
    markers: tuple[str, ...] = (START, END, "<|python_tag|>")

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        body = re.sub(r"<\|python_(?:start|end|tag)\|>", "", text).strip()
        if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body):
            return ParsedText(text)
        try:
            tree = ast.parse(body[:MAX_LENGTH], mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            name = re.match(r"\[\s*([\w.]+)", body)
            what = getattr(error, "msg", None) or str(error)
            return ParsedText("", (call(name.group(1) if name else "", raw=body, error=f"not valid Python: {what}"),))
        if not isinstance(tree, ast.List):
            return ParsedText("", (call(raw=body, error="must be one list of calls"),))
        return ParsedText("", tuple(_read(item, body) for item in tree.elts))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def _read(node: ast.expr, body: str) -> ToolCall:
    raw = ast.get_source_segment(body, node) or body
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
        return call(raw=raw, error=f"{raw[:40]!r} is not a call")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return call(name, raw=raw, error="arguments must be written with their names, name=value")
    try:
        return call(name, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}, raw=raw)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return call(name, raw=raw, error="arguments must be plain values: text, numbers, lists, dicts")


PARSER = Llama3PythonicParser()
