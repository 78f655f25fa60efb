"""Solar Open: `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{…}<|tool_call:end|>`, any number."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_with
from agentrl_cli.chat.parsers.blocks import parse_blocks
from agentrl_cli.types import ToolCall, ToolSchema

CONTENT, HEAD = "<|content|>", "<|tool_calls|>"
OPEN, NAME, ARGUMENTS, CLOSE = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"


class SolarParser:
    """Calls after `<|tool_calls|>`, each with an id that the model writes."""

    name = "solar"
    markers: tuple[str, ...] = (CONTENT, HEAD, OPEN, NAME, ARGUMENTS, CLOSE)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_blocks(text.removeprefix(CONTENT).replace(HEAD, ""), OPEN, CLOSE, _read)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps(dict(arguments), ensure_ascii=False)
        return f"{HEAD}{OPEN}c00000000{NAME}{name}{ARGUMENTS}{body}{CLOSE}"


def _read(raw: str) -> ToolCall:
    head, found, body = raw.partition(ARGUMENTS)
    id_, named, name = (part.strip() for part in head.partition(NAME))
    if not found or not named or not name:
        return call(raw=raw, error=f"an id, {NAME}, the tool's name and {ARGUMENTS} must stand before the arguments")
    return call_with(name, body, raw, id_ if re.fullmatch(r"[\w.:\-]{1,64}", id_) else "")


PARSER = SolarParser()
