"""GLM-4.5 and later: the name, then pairs of `<arg_key>` and `<arg_value>`, values as bare text or JSON."""

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
PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class GLMParser:
    """`<tool_call>f\\n<arg_key>x</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>`"""

    name = "glm"
    markers: tuple[str, ...] = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_blocks(text, OPEN, CLOSE, partial(_read, tools=tools))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in shown.items())
        return f"{OPEN}{name}\n{pairs}{CLOSE}"


def _read(raw: str, tools: Sequence[ToolSchema]) -> ToolCall:
    place = raw.find("<arg_")
    name = (raw if place < 0 else raw[:place]).strip()
    if not name or not re.fullmatch(r"[\w.\-]+", name):
        return call(raw=raw, error="the tool's name must stand right after <tool_call>")
    body = "" if place < 0 else raw[place:]
    if problem := too_many(body, "<arg_key>"):
        return call(name, raw=raw, error=problem)
    loose = PAIR.sub("", body).strip()
    if loose:
        return call(name, raw=raw, error=f"an <arg_key> without its <arg_value>, or text between them: {loose[:40]!r}")
    pairs = [(key.strip(), value) for key, value in PAIR.findall(body)]
    return call(name, {key: typed_value(value, tools, name, key) for key, value in pairs}, raw=raw)


PARSER = GLMParser()
