"""Qwen3-Coder: XML-like calls, one `<parameter=…>` a line block, values as bare text; Seed-OSS in tags of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, typed_value
from agentrl_cli.chat.parsers.blocks import parse_blocks, too_many
from agentrl_cli.types import ToolCall, ToolSchema

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3CoderParser:
    """`<tool_call>\\n<function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>\\n</tool_call>`"""

    def __init__(self, name: str = "qwen3_coder", opening: str = OPEN, closing: str = CLOSE) -> None:
        self.name = name
        inner = ("<function=", "</function>", "<parameter=", "</parameter>")
        self.markers: tuple[str, ...] = (opening, closing, *inner)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_blocks(text, self.markers[0], self.markers[1], partial(_read, tools=tools))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
        return f"{self.markers[0]}\n<function={name}>\n{lines}</function>\n{self.markers[1]}"


def _read(raw: str, tools: Sequence[ToolSchema]) -> ToolCall:
    head = re.match(r"\s*<function=([^>\n]*)>", raw)
    if not head:
        return call(raw=raw, error="<function=NAME> is missing at its start")
    name = head.group(1).strip()
    if not name:
        return call(raw=raw, error="the function has no name")
    body, closed, rest = raw[head.end() :].partition("</function>")
    if not closed:
        return call(name, raw=raw, error="</function> is missing")
    if rest.strip():
        return call(name, raw=raw, error=f"there is text after </function>: {rest.strip()[:40]!r}")
    if problem := too_many(body, "<parameter="):
        return call(name, raw=raw, error=problem)
    loose = PARAMETER.sub("", body).strip()
    if loose:
        what = "</parameter> is missing" if loose.startswith("<parameter=") else f"unexpected text {loose[:40]!r}"
        return call(name, raw=raw, error=what)
    pairs = PARAMETER.findall(body)
    return call(name, {key: typed_value(value, tools, name, key) for key, value in pairs}, raw=raw)


PARSER = Qwen3CoderParser()
SEED = Qwen3CoderParser("seed_oss", "<seed:tool_call>", "</seed:tool_call>")
