"""Calls as `<invoke name="f">` with `<parameter name="x">` inside of a section, the tags prefixed by the family.

deepseek_v32  `<｜DSML｜function_calls>` (V3.2) or `<｜DSML｜tool_calls>` (V4); `string="true"` : text
minimax_m2    `<minimax:tool_call>`, tags without a prefix
muse_glimmer  `<atem:function_calls>`; a message for each call
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, read_json, typed_value
from agentrl_cli.chat.parsers.blocks import parse_section, too_many
from agentrl_cli.types import ToolCall, ToolSchema


class InvokeParser:
    """`sections` are the names that the section's tag may have; the first is the example's."""

    def __init__(self, name: str, prefix: str, sections: Sequence[str], typed: bool = False, head: str = "") -> None:
        """`typed`: parameters say by `string="true"` whether they are text; `head`: what begins a turn, a pattern."""
        self.name = name
        self._sections = [(f"<{section}>", f"</{section}>") for section in sections]
        self._block = (f'<{prefix}invoke name="', f"</{prefix}invoke>")
        self._open, self._close = f'<{prefix}parameter name="', f"</{prefix}parameter>"
        self._typed, self._head = typed, re.compile(head)
        self._parameter = re.compile(
            rf'{re.escape(self._open)}([^"\n]+)"(?: string="(true|false)")?>(.*?){re.escape(self._close)}', re.DOTALL
        )
        self.markers: tuple[str, ...] = (
            *(text for pair in self._sections for text in pair),
            *(*self._block, self._open, self._close),
            *(("<|message|>",) if head else ()),
        )

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        if head := self._head.match(text):
            text = text[head.end() :]
        section = next((pair for pair in self._sections if pair[0] in text), self._sections[0])
        if text.count(section[0]) > 1:  # a message for each call: what stands between them is markup
            *parts, last = text.split(section[0])
            heads = [part.partition(section[1]) for part in parts]
            text = "".join(head if closed else head + section[0] for head, closed, _ in heads) + last
        return parse_section(text, section, self._block, partial(self._read, tools=tools))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        opening, closing = self._sections[0]
        lines = "".join(f"{self._written(key, value)}\n" for key, value in arguments.items())
        return f'{opening}\n{self._block[0]}{name}">\n{lines}{self._block[1]}\n{closing}'

    def _written(self, key: str, value: Any) -> str:
        text = isinstance(value, str)
        kind = f' string="{str(text).lower()}"' if self._typed else ""
        return f'{self._open}{key}"{kind}>{value if text else json.dumps(value, ensure_ascii=False)}{self._close}'

    def _read(self, raw: str, tools: Sequence[ToolSchema]) -> ToolCall:
        name, closed, body = raw.partition('">')
        name = name.strip()
        if not closed or not re.fullmatch(r"[^\s\"<>]+", name):
            return call(raw=raw, error=f'{self._block[0]}NAME"> must begin a call')
        if problem := too_many(body, self._open):
            return call(name, raw=raw, error=problem)
        loose = self._parameter.sub("", body).strip()
        if loose:
            missing = loose.startswith(self._open)
            return call(
                name, raw=raw, error=f"{self._close} is missing" if missing else f"unexpected text {loose[:40]!r}"
            )
        found: dict[str, Any] = {}
        for key, text, value in self._parameter.findall(body):
            if text != "false":
                found[key] = value if text else typed_value(value, tools, name, key)
                continue
            found[key], error = read_json(value.strip())
            if error:
                return call(name, raw=raw, error=f'the value of "{key}" is {error}')
        return call(name, found, raw=raw)


DEEPSEEK_V32 = InvokeParser("deepseek_v32", "｜DSML｜", ("｜DSML｜function_calls", "｜DSML｜tool_calls"), typed=True)
MINIMAX_M2 = InvokeParser("minimax_m2", "", ("minimax:tool_call",))
MUSE_GLIMMER = InvokeParser("muse_glimmer", "atem:", ("atem:function_calls",), head=r"\s*to=\S+?<\|message\|>")
