"""Llama's JSON calls: the whole turn is `{"name": …, "parameters": {…}}`, several separated by semicolons.

Llama 3 requires no markers (`<|python_tag|>` is optional), so a turn counts as a call if it starts as one: with the
tag, or with a JSON object that has a "name". Any other JSON is an answer. Llama 4 writes these or a Python list; text
before the calls stands between `<|python_start|>` and `<|python_end|>`, and so may a list.
https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_of, read_call
from agentrl_cli.chat.parsers.pythonic import END, LLAMA3_PYTHONIC, START
from agentrl_cli.types import ToolCall, ToolSchema

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
            return [*calls, read_call(text[position:], KEYS)]
        calls.append(call_of(value, text[position:end], KEYS))
        separator = SEPARATOR.match(text, end)
        position = separator.end() if separator else end
    return calls or [call(raw=text, error=f"nothing follows {TAG}")]


LLAMA3_JSON = Llama3JSONParser()
LLAMA4 = Llama4Parser()
