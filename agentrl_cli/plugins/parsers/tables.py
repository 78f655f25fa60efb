"""Rows for the core's parsers of blocks with JSON and of tags.

functionary_v31 `<function=f>{…}</function>`
gigachat3_1     `<|function_call|>{"name": "f", "arguments": {…}}`; gigachat3 writes it as a message of that role
solar           an id, the name and the arguments between tokens
hunyuan         GLM's keys and values in a section, all tags with the release's mark: `<tool_call:opensource>`
seed_oss        Qwen3-Coder's line blocks in blocks of its own
minicpm         `<function name="f"><param name="x">`, text with markup in a CDATA section
muse_glimmer    MiniMax M2's tags with a prefix; a message for each call
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import BlockParser, ParsedText, read_call
from agentrl_cli.chat.parsers.json_blocks import read_after, write_call
from agentrl_cli.chat.parsers.tags import TagParser, function_tags, invoke_tags, key_tags
from agentrl_cli.types import ToolSchema


class GigaChatParser:
    """`<|function_call|>{"name": "f", "arguments": {…}}`, one in a turn; the end of its message closes it."""

    END = "<|message_sep|>"

    def __init__(self, name: str, opening: str) -> None:
        self.name = name
        self.markers: tuple[str, ...] = (opening,)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        content, *blocks = text.split(self.markers[0])
        if not blocks:
            return ParsedText(text)
        calls = tuple(read_call(block.partition(self.END)[0].strip()) for block in blocks)
        return ParsedText(content.rstrip("\n").removesuffix(self.END), calls)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return write_call(f"{self.markers[0]}{{call}}", name, arguments)


GIGACHAT3 = GigaChatParser("gigachat3", "function call<|role_sep|>\n")
GIGACHAT3_1 = GigaChatParser("gigachat3_1", "<|function_call|>")

FUNCTIONARY_V31 = BlockParser(
    "functionary_v31",
    ("<function=", "</function>"),
    partial(write_call, "<function={name}>{arguments}</function>"),
    read_after(re.compile(r"(?P<name>[\w.\-]+)>"), "<function=NAME> must begin a call"),
)

SOLAR = BlockParser(
    "solar",
    ("<|tool_call:begin|>", "<|tool_call:end|>"),
    partial(
        write_call,
        "<|tool_calls|><|tool_call:begin|>c00000000<|tool_call:name|>{name}<|tool_call:args|>{arguments}"
        "<|tool_call:end|>",
    ),
    read_after(
        re.compile(r"(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]*)<\|tool_call:args\|>"),
        "an id, <|tool_call:name|>, the tool's name and <|tool_call:args|> must stand before the arguments",
    ),
    inner=("<|tool_call:name|>", "<|tool_call:args|>"),
    around=("<|content|>", "<|tool_calls|>"),
)

_HUNYUAN = key_tags("hunyuan", ":opensource", "<tool_sep:opensource>")
_SECTION = "<tool_calls:opensource>", "</tool_calls:opensource>"
HUNYUAN = replace(
    _HUNYUAN,
    head_error="the tool's name and <tool_sep:opensource> must stand right after <tool_call:opensource>",
    written=f"{_SECTION[0]}\n{_HUNYUAN.block[0]}{{name}}<tool_sep:opensource>\n{{arguments}}{_HUNYUAN.block[1]}\n"
    + _SECTION[1],
    markers=(*_SECTION, *_HUNYUAN.markers, "<tool_sep:opensource>"),
    stray="a key without its value, or text between them:",
    sections=(_SECTION,),
)

SEED_OSS = function_tags("seed_oss", "<seed:tool_call>", "</seed:tool_call>")

MINICPM = TagParser(
    "minicpm",
    ('<function name="', "</function>"),
    head=re.compile(r'([^\s"<>]+)">'),
    head_error='<function name="NAME"> must begin a call',
    argument=re.compile(
        r'<param name="(?P<key>[^"\n]+)">(?:<!\[CDATA\[(?P<quoted>.*?)\]\]>|(?P<value>.*?))</param>',
        re.DOTALL,
    ),
    opening='<param name="',
    closing="</param>",
    written='<function name="{name}">{arguments}</function>',
    pair='<param name="{key}">{value}</param>',
    markers=('<function name="', "</function>", '<param name="', "</param>"),
    quote=lambda text: f"<![CDATA[{text}]]>" if re.search(r"[<&\n]", text) else text,
)

_MUSE = invoke_tags("muse_glimmer", "atem:", "function_calls")
MUSE_GLIMMER = replace(
    _MUSE,
    markers=(*_MUSE.markers, "<|message|>"),
    prepare=lambda text: re.sub(r"\A\s*to=\S+?<\|message\|>", "", text),
)
