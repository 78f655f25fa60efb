"""Kimi K3: tags of control tokens, `<|open|>call tool="f" index="1"<|sep|>` to `<|close|>call<|sep|>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape, unescape
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_with, read_json
from agentrl_cli.chat.parsers.blocks import parse_section, too_many
from agentrl_cli.types import ToolCall, ToolSchema

TAG, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
TOOLS = f"{TAG}tools{SEP}", f"{CLOSE}tools{SEP}"
CALL = f'{TAG}call tool="', f"{CLOSE}call{SEP}"
THOUGHT = f"{CLOSE}think{SEP}"
HEAD = re.compile(r'([^"\n]+)"(?: index="\d+")?<\|sep\|>')
ARGUMENT = re.compile(
    r'<\|open\|>argument key="([^"]*)" type="(\w+)"<\|sep\|>(.*?)<\|close\|>argument<\|sep\|>', re.DOTALL
)
WHOLE = re.compile(r'<\|open\|>json type="object"<\|sep\|>(.*?)<\|close\|>json<\|sep\|>', re.DOTALL)
AROUND = re.compile(r"<\|(?:open|close)\|>(?:response|message)(?: [^<]*)?<\|sep\|>")
"""What stands around an answer, which is no part of it."""


class KimiK3Parser:
    """Calls between `<|open|>tools<|sep|>` and `<|close|>tools<|sep|>`."""

    name = "kimi_k3"
    markers: tuple[str, ...] = (TAG, CLOSE, SEP)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        said = text.rpartition(THOUGHT)[2]  # a call in thinking is none, and thinking is no part of an answer
        return parse_section(AROUND.sub("", said), TOOLS, CALL, _read)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        said = "".join(_written(key, value) for key, value in arguments.items())
        return f'{TOOLS[0]}{CALL[0]}{escape(name)}" index="1"{SEP}{said}{CALL[1]}{TOOLS[1]}'


def _written(key: str, value: Any) -> str:
    kinds = {str: "string", bool: "boolean", type(None): "null", int: "number", float: "number", dict: "object"}
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    kind = kinds.get(type(value), "array")
    return f'{TAG}argument key="{escape(key)}" type="{kind}"{SEP}{text}{CLOSE}argument{SEP}'


def _read(raw: str) -> ToolCall:
    head = HEAD.match(raw)
    if not head:
        return call(raw=raw, error=f'{CALL[0]}NAME" index="1"{SEP} must begin a call')
    name, body = unescape(head[1]), raw[head.end() :]
    if whole := WHOLE.fullmatch(body.strip()):
        return call_with(name, whole[1], raw)
    if problem := too_many(body, f"{TAG}argument"):
        return call(name, raw=raw, error=problem)
    loose = ARGUMENT.sub("", body).strip()
    if loose:
        return call(name, raw=raw, error=f"an argument without its key, type and end: {loose[:40]!r}")
    found: dict[str, Any] = {}
    for key, kind, text in ARGUMENT.findall(body):
        value, error = (text, None) if kind == "string" else read_json(text.strip())
        if error:
            return call(name, raw=raw, error=f'the value of "{unescape(key)}" is {error}')
        found[unescape(key)] = value
    return call(name, found, raw=raw)


PARSER = KimiK3Parser()
