"""MiniCPM 5: `<function name="f"><param name="x">1</param></function>`, text with markup in a CDATA section."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, typed_value
from agentrl_cli.chat.parsers.blocks import parse_blocks, too_many
from agentrl_cli.types import ToolCall, ToolSchema

OPEN, CLOSE = '<function name="', "</function>"
PARAM, PARAM_END = '<param name="', "</param>"
PAIR = re.compile(rf'{PARAM}([^"\n]+)">(?:<!\[CDATA\[(.*?)\]\]>|(.*?)){PARAM_END}', re.DOTALL)


class MiniCPMParser:
    """`<function name="f"><param name="x">1</param></function>`"""

    name = "minicpm"
    markers: tuple[str, ...] = (OPEN, CLOSE, PARAM, PARAM_END)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_blocks(text, OPEN, CLOSE, partial(_read, tools=tools))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        pairs = "".join(f'{PARAM}{key}">{_written(value)}{PARAM_END}' for key, value in arguments.items())
        return f'{OPEN}{name}">{pairs}{CLOSE}'


def _written(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return f"<![CDATA[{value}]]>" if re.search(r"[<&\n]", value) else value


def _read(raw: str, tools: Sequence[ToolSchema]) -> ToolCall:
    name, found, body = raw.partition('">')
    if not found or not re.fullmatch(r"[^\s\"<>]+", name):
        return call(raw=raw, error=f'{OPEN}NAME"> must begin a call')
    if problem := too_many(body, PARAM):
        return call(name, raw=raw, error=problem)
    loose = PAIR.sub("", body).strip()
    if loose:
        missing = loose.startswith(PARAM)
        return call(name, raw=raw, error=f"{PARAM_END} is missing" if missing else f"unexpected text {loose[:40]!r}")
    values = {key: quoted or typed_value(bare, tools, name, key) for key, quoted, bare in PAIR.findall(body)}
    return call(name, values, raw=raw)


PARSER = MiniCPMParser()
