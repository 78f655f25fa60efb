"""GigaChat: `<|function_call|>` and one JSON object (3.1), or a message of the role `function call` (3)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, read_call
from agentrl_cli.types import ToolSchema

ROLE = "function call<|role_sep|>\n"
END = "<|message_sep|>"


class GigaChatParser:
    """`<|function_call|>{"name": "f", "arguments": {…}}`, one in a turn."""

    def __init__(self, name: str, opening: str) -> None:
        self.name = name
        self.markers: tuple[str, ...] = (opening,)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        content, *blocks = text.split(self.markers[0])
        if not blocks:
            return ParsedText(text)
        calls = tuple(read_call(block.partition(END)[0].strip()) for block in blocks)
        return ParsedText(content.rstrip("\n").removesuffix(END), calls)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"{self.markers[0]}{body}"


GIGACHAT3 = GigaChatParser("gigachat3", ROLE)
GIGACHAT31 = GigaChatParser("gigachat3_1", "<|function_call|>")
