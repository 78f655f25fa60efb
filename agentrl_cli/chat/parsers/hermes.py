"""Hermes and Qwen: `<tool_call>`, one JSON object, `</tool_call>`; any number of them, text before the first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, read_call
from agentrl_cli.chat.parsers.blocks import parse_blocks
from agentrl_cli.types import ToolSchema

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """`<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>`"""

    name = "hermes"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_blocks(text, OPEN, CLOSE, read_call)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"{OPEN}\n{body}\n{CLOSE}"


PARSER = HermesParser()
