"""One call a block, with its arguments as one JSON object.

hermes           `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes and Qwen
gigachat3_1      `<|function_call|>{"name": "f", "arguments": {…}}`; gigachat3 writes it as a message of that role
functionary_v31  `<function=f>{…}</function>`
kimi_k2          a section of `functions.f:0` and the arguments between tokens
deepseek         a section of calls: `function<｜tool▁sep｜>f` and a code fence (V3, R1), or `f<｜tool▁sep｜>{…}` (V3.1)
solar            an id, the name and the arguments between tokens
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_with, read_call
from agentrl_cli.chat.parsers.blocks import Markers, parse_blocks
from agentrl_cli.types import ToolCall, ToolSchema

OWN_ID = re.compile(r"[\w.:\-]{1,64}")
"""An id that a model may give to its call."""


@dataclass
class JSONBlockParser:
    """Calls between the markers `block`, inside sections if `section` is given."""

    name: str
    block: Markers
    written: str
    """The format of a call, with `{name}` and `{arguments}`, or `{call}` for the object that holds both."""
    read: Callable[[str], ToolCall] = read_call
    section: Markers | None = None
    inner: tuple[str, ...] = ()
    """Further markers, inside a block."""
    around: tuple[str, ...] = ()
    """Markers beside the blocks and around an answer, which are not content."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*(self.section or ()), *self.block, *self.inner, *self.around)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        found = parse_blocks(text, self.block, self.read, self.section)
        if not any(marker in found.content for marker in self.around):
            return found
        content = re.sub("|".join(map(re.escape, self.around)), "", found.content)
        return ParsedText(content.rstrip("\n") if found.calls else content, found.calls)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return _write(self.written, name, arguments)


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
        return _write(f"{self.markers[0]}{{call}}", name, arguments)


def _write(written: str, name: str, arguments: Mapping[str, Any]) -> str:
    both = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    alone = json.dumps(dict(arguments), ensure_ascii=False)
    return written.format(name=name, call=both, arguments=alone)


def _after(head: re.Pattern[str], error: str) -> Callable[[str], ToolCall]:
    """Reads a block of a head, with the groups `name` and perhaps `id`, and JSON after it; else the error."""

    def read(raw: str) -> ToolCall:
        found = head.match(raw)
        name = found["name"].strip() if found else ""
        if found is None or not name:
            return call(raw=raw, error=error)
        id_ = (found.groupdict().get("id") or "").strip()
        return call_with(name, raw[found.end() :], raw, id_ if OWN_ID.fullmatch(id_) else "")

    return read


SEP = "<｜tool▁sep｜>"
FENCED = re.compile(r"\s*(\S+)\s*```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)


def _read_deepseek(raw: str) -> ToolCall:
    head, found, tail = raw.partition(SEP)
    name, text = head.strip(), tail
    if not found:
        return call(raw=raw, error=f"{SEP} between type and name is missing")
    if name == "function":
        fenced = FENCED.fullmatch(tail)
        if not fenced:
            name = tail.split("\n", 1)[0].strip()
            return call(
                name, raw=raw, error="after the name the arguments must follow in a ```json block"
            )
        name, text = fenced[1], fenced[2]
    return call_with(name, text, raw) if name else call(raw=raw, error="the function has no name")


HERMES = JSONBlockParser(
    "hermes", ("<tool_call>", "</tool_call>"), "<tool_call>\n{call}\n</tool_call>"
)

GIGACHAT3 = GigaChatParser("gigachat3", "function call<|role_sep|>\n")
GIGACHAT31 = GigaChatParser("gigachat3_1", "<|function_call|>")

FUNCTIONARY_V31 = JSONBlockParser(
    "functionary_v31",
    ("<function=", "</function>"),
    "<function={name}>{arguments}</function>",
    _after(re.compile(r"(?P<name>[\w.\-]+)>"), "<function=NAME> must begin a call"),
)

DEEPSEEK = JSONBlockParser(
    "deepseek",
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}{{name}}\n```json\n{{arguments}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    _read_deepseek,
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    inner=(SEP,),
)

# https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
KIMI_K2 = JSONBlockParser(
    "kimi_k2",
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    _after(
        re.compile(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
        ),
        "functions.NAME:NUMBER and <|tool_call_argument_begin|> must stand before the arguments",
    ),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_argument_begin|>",),
)

SOLAR = JSONBlockParser(
    "solar",
    ("<|tool_call:begin|>", "<|tool_call:end|>"),
    "<|tool_calls|><|tool_call:begin|>c00000000<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
    _after(
        re.compile(r"(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]*)<\|tool_call:args\|>"),
        "an id, <|tool_call:name|>, the tool's name and <|tool_call:args|> must stand before the arguments",
    ),
    inner=("<|tool_call:name|>", "<|tool_call:args|>"),
    around=("<|content|>", "<|tool_calls|>"),
)
