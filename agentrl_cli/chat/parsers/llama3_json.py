"""Llama 3: the whole turn is `{"name": …, "parameters": {…}}`, several separated by semicolons.

There are no markers (`<|python_tag|>` is optional), so a turn is taken for a call where it starts as one: with the
tag, or with a JSON object that has a "name". Any other JSON is an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_of, read_call
from agentrl_cli.types import ToolCall, ToolSchema

TAG = "<|python_tag|>"
KEYS = ("parameters", "arguments")


class Llama3JSONParser:
    """`{"name": "f", "parameters": {…}}`"""

    name = "llama3_json"
    markers: tuple[str, ...] = (TAG,)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        content, tagged, body = text.partition(TAG)
        if not tagged:
            if not re.match(r"\s*\{\s*\"(?:name|type|function|parameters|arguments)\"", text):
                return ParsedText(text)
            content, body = "", text
        return ParsedText(content.rstrip("\n"), tuple(_read_all(body)))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "parameters": dict(arguments)}, ensure_ascii=False)


def _read_all(text: str) -> list[ToolCall]:
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    position = 0
    text = text.strip()
    while position < len(text):
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number of thousands of digits
            return [*calls, read_call(text[position:], KEYS)]
        calls.append(call_of(value, text[position:end], KEYS))
        separator = re.compile(r"[\s;]*").match(text, end)
        position = separator.end() if separator else end
    return calls or [call(raw=text, error=f"nothing follows {TAG}")]


PARSER = Llama3JSONParser()
