"""DeepSeek V3 and R1 (`function<｜tool▁sep｜>NAME`, JSON in a code fence) and V3.1 (`NAME<｜tool▁sep｜>{…}`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_with
from agentrl_cli.chat.parsers.blocks import parse_section
from agentrl_cli.types import ToolCall, ToolSchema

ALL_OPEN, ALL_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCED = re.compile(r"\s*(\S+)\s*```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


class DeepSeekParser:
    """Calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`."""

    name = "deepseek"
    markers: tuple[str, ...] = (ALL_OPEN, ALL_CLOSE, OPEN, CLOSE, SEP)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_section(text, (ALL_OPEN, ALL_CLOSE), (OPEN, CLOSE), _read)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps(dict(arguments), ensure_ascii=False)
        return f"{ALL_OPEN}{OPEN}function{SEP}{name}\n```json\n{body}\n```{CLOSE}{ALL_CLOSE}"


def _read(raw: str) -> ToolCall:
    head, found, tail = raw.partition(SEP)
    if not found:
        return call(raw=raw, error=f"{SEP} between type and name is missing")
    if head.strip() == "function":
        fenced = FENCED.fullmatch(tail)
        if not fenced:
            name = tail.split("\n", 1)[0].strip()
            return call(name, raw=raw, error="after the name the arguments must follow in a ```json block")
        name, text = fenced.group(1), fenced.group(2)
    else:
        name, text = head.strip(), tail
    if not name:
        return call(raw=raw, error="the function has no name")
    return call_with(name, text, raw)


PARSER = DeepSeekParser()
