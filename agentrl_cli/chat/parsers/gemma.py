"""Gemma: `call:NAME{key:value,…}`, in the markers of Gemma 4 or of FunctionGemma, text between quote tokens.

Values are texts between two quote tokens, numbers, `true`, `false`, `null`, lists and objects; keys inside objects are
quoted the same way, or bare. https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
With JSON's quotes in place of the tokens that is JSON, and read as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import BlockParser, Markers, call, read_json
from agentrl_cli.types import ToolCall, ToolSchema

THINKING = re.compile(r"<\|channel>thought\n?(.*?)(?:\n?<channel\|>|\Z)", re.DOTALL)
HEAD = re.compile(r"\s*call:([\w.\-]+)\s*(?=\{)")


def _write(name: str, arguments: Mapping[str, Any], *, block: Markers, quote: str) -> str:
    return f"{block[0]}call:{name}{_write_value(dict(arguments), quote, '')}{block[1]}"


def _write_value(value: Any, quote: str, around: str) -> str:
    """Return a value; `around` stands around the keys of an object, the quote token in all that are inside."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        items = (f"{around}{k}{around}:{_write_value(v, quote, quote)}" for k, v in value.items())
        return f"{{{','.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_write_value(item, quote, quote) for item in value)}]"
    return json.dumps(value)


def _read(raw: str, tools: Sequence[ToolSchema] = (), *, quote: str) -> ToolCall:
    head = HEAD.match(raw)
    if not head:
        error = "call:NAME and arguments in braces must follow the opening marker"
        return call(raw=raw, error=error)
    try:
        value, fault = read_json(_to_json(raw[head.end() :].strip(), quote))
    except ValueError as error:
        return call(head[1], raw=raw, error=str(error))
    fault = fault and fault.removeprefix("not valid JSON: ")  # nor is it meant to be
    fault = fault and fault.replace(" enclosed in double quotes", "")
    return call(head[1], value, raw=raw, error=fault)


def _to_json(text: str, quote: str) -> str:
    """Return the JSON that a text stands for. Raises ValueError for a text without its quote tokens."""
    mark = re.escape(quote)
    # The group `open` matches where a text is not closed: it then reaches to the end, and is searched for once.
    token = re.compile(
        rf"\s*(?:{mark}(?P<text>.*?)(?:{mark}|(?P<open>\Z))"
        r"|(?P<mark>[{}\[\],:])|(?P<word>[^,\[\]{}:]+))",
        re.DOTALL,
    )

    def convert(found: re.Match[str]) -> str:
        if found.lastgroup == "open":
            raise ValueError(f"a text is not closed by {quote}")
        if found["text"] is not None:
            return json.dumps(found["text"], ensure_ascii=False)
        word = (found["mark"] or found["word"]).strip()
        if found["word"] and text[found.end() : found.end() + 1] == ":":  # a bare key
            return json.dumps(word, ensure_ascii=False)
        if found["word"] and read_json(word)[1]:
            raise ValueError(f"text must stand between two {quote}, not as {word[:40]!r}")
        return word

    return token.sub(convert, text)


def _family(name: str, opening: str, closing: str, quote: str) -> BlockParser:
    write = partial(_write, block=(opening, closing), quote=quote)
    read = partial(_read, quote=quote)
    return BlockParser(name, (opening, closing), write, read, inner=(quote,))


FUNCTION_GEMMA = _family(
    "gemma3_function", "<start_function_call>", "<end_function_call>", "<escape>"
)
GEMMA4 = _family("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
GEMMA4.inner += ("<|channel>", "<channel|>")
GEMMA4.thought = THINKING
