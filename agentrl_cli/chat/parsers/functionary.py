"""Functionary: `<function=f>{…}</function>` (v3.1), or `f` and its JSON on lines of their own after `>>>` (v3.2).

In v3.2 the generation prompt ends with `>>>`, so a turn begins with the recipient's name: `all` for an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_with
from agentrl_cli.chat.parsers.blocks import parse_blocks
from agentrl_cli.types import ToolCall, ToolSchema

OPEN, CLOSE = "<function=", "</function>"
TURN = ">>>"
CALLED = re.compile(r"([A-Za-z_][\w.\-]*)\n(\s*\{.*)", re.DOTALL)
ANSWER = "all\n"


class Functionary31Parser:
    """`<function=f>{"x": 1}</function>`"""

    name = "functionary_v31"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_blocks(text, OPEN, CLOSE, _read)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{OPEN}{name}>{json.dumps(dict(arguments), ensure_ascii=False)}{CLOSE}"


def _read(raw: str) -> ToolCall:
    name, found, body = raw.partition(">")
    if not found or not re.fullmatch(r"[\w.\-]+", name):
        return call(raw=raw, error=f"{OPEN}NAME> must begin a call")
    return call_with(name, body, raw)


class Functionary32Parser:
    """`f\\n{"x": 1}`, several separated by `>>>`"""

    name = "functionary_v32"
    markers: tuple[str, ...] = (TURN,)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        said: list[str] = []
        calls: list[ToolCall] = []
        for part in text.split(TURN):
            called = CALLED.fullmatch(part)
            if called and called[1] != ANSWER.strip():
                calls.append(call_with(called[1], called[2], part))
            elif part:
                said.append(part.removeprefix(ANSWER))
        plain = not calls and not text.startswith(ANSWER)
        return ParsedText(text) if plain else ParsedText("".join(said).rstrip("\n"), tuple(calls))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}\n{json.dumps(dict(arguments), ensure_ascii=False)}"


V31 = Functionary31Parser()
V32 = Functionary32Parser()
