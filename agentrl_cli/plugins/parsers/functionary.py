"""Functionary v3.2: a tool's name and its JSON on lines of their own, several separated by `>>>`.

The generation prompt ends with `>>>`, so a turn begins with the recipient's name: `all` for an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call_with
from agentrl_cli.types import ToolCall, ToolSchema

CALLED = re.compile(r"([A-Za-z_][\w.\-]*)\n(\s*\{.*)", re.DOTALL)
SEPARATOR = re.compile(r">>>(?=[A-Za-z_][\w.\-]*\n|$)")
"""Only before a recipient's line: arguments may hold `>>>`, and in JSON no line ends within a text."""
ANSWER = "all\n"


class Functionary32Parser:
    """`f\\n{"x": 1}`"""

    name = "functionary_v32"
    unmarked = True
    markers: tuple[str, ...] = (">>>",)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        answers: list[str] = []
        calls: list[ToolCall] = []
        for part in SEPARATOR.split(text):
            called = CALLED.fullmatch(part)
            if called and called[1] != ANSWER.strip():
                calls.append(call_with(called[1], called[2], part))
            elif part:
                answers.append(part.removeprefix(ANSWER))
        if not calls and not text.startswith(ANSWER):
            return ParsedText(text)
        return ParsedText("".join(answers).rstrip("\n"), tuple(calls))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}\n{json.dumps(dict(arguments), ensure_ascii=False)}"


PARSER = Functionary32Parser()
