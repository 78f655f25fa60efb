"""Kimi K2: a section of calls, each `functions.NAME:NUMBER` and a JSON object.

The format: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_with
from agentrl_cli.chat.parsers.blocks import parse_section
from agentrl_cli.types import ToolCall, ToolSchema

ALL_OPEN, ALL_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ID = re.compile(r"(?:functions\.)?([\w.\-]+?)(?::\d+)?")


class KimiK2Parser:
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section."""

    name = "kimi_k2"
    markers: tuple[str, ...] = (ALL_OPEN, ALL_CLOSE, OPEN, ARGUMENTS, CLOSE)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_section(text, (ALL_OPEN, ALL_CLOSE), (OPEN, CLOSE), _read)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps(dict(arguments), ensure_ascii=False)
        return f"{ALL_OPEN}{OPEN}functions.{name}:0{ARGUMENTS}{body}{CLOSE}{ALL_CLOSE}"


def _read(raw: str) -> ToolCall:
    head, found, body = raw.partition(ARGUMENTS)
    id_ = head.strip()
    named = ID.fullmatch(id_)
    if not found or not named:
        return call(raw=raw, error=f"functions.NAME:NUMBER and {ARGUMENTS} must stand before the arguments")
    return call_with(named[1], body, raw, id_)


PARSER = KimiK2Parser()
