"""Hunyuan 3: a section of calls, each a name, `<tool_sep>` and pairs of `<arg_key>` and `<arg_value>` as in GLM.

Its tags end in the release's mark: `<tool_call:opensource>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, typed_value
from agentrl_cli.chat.parsers.blocks import parse_section, too_many
from agentrl_cli.types import ToolCall, ToolSchema

MARK = ":opensource"


def _tag(name: str) -> str:
    return f"<{name}{MARK}>"


SECTION = _tag("tool_calls"), _tag("/tool_calls")
BLOCK = _tag("tool_call"), _tag("/tool_call")
SEP = _tag("tool_sep")
KEY, VALUE = (_tag("arg_key"), _tag("/arg_key")), (_tag("arg_value"), _tag("/arg_value"))
PAIR = re.compile(rf"{KEY[0]}(.*?){KEY[1]}\s*{VALUE[0]}(.*?){VALUE[1]}", re.DOTALL)


class HunyuanParser:
    """`<tool_call>f<tool_sep>\\n<arg_key>x</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>`, with the mark."""

    name = "hunyuan"
    markers: tuple[str, ...] = (*SECTION, *BLOCK, SEP, *KEY, *VALUE)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_section(text, SECTION, BLOCK, partial(_read, tools=tools))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        shown = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        pairs = "".join(f"{KEY[0]}{k}{KEY[1]}\n{VALUE[0]}{v}{VALUE[1]}\n" for k, v in shown.items())
        return f"{SECTION[0]}\n{BLOCK[0]}{name}{SEP}\n{pairs}{BLOCK[1]}\n{SECTION[1]}"


def _read(raw: str, tools: Sequence[ToolSchema]) -> ToolCall:
    name, found, body = raw.partition(SEP)
    name = name.strip()
    if not found or not re.fullmatch(r"[\w.\-]+", name):
        return call(raw=raw, error=f"the tool's name and {SEP} must stand right after {BLOCK[0]}")
    if problem := too_many(body, KEY[0]):
        return call(name, raw=raw, error=problem)
    loose = PAIR.sub("", body).strip()
    if loose:
        return call(name, raw=raw, error=f"a key without its value, or text between them: {loose[:40]!r}")
    pairs = [(key.strip(), value) for key, value in PAIR.findall(body)]
    return call(name, {key: typed_value(value, tools, name, key) for key, value in pairs}, raw=raw)


PARSER = HunyuanParser()
