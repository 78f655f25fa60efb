"""One call a block, with its arguments as one JSON object.

hermes           `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes and Qwen
kimi_k2          a section of `functions.f:0` and the arguments between tokens
deepseek         a section of calls: `function<｜tool▁sep｜>f` and a code fence (V3, R1), or `f<｜tool▁sep｜>{…}` (V3.1)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_with, read_call
from agentrl_cli.chat.parsers.blocks import Markers, Read, parse_blocks
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
    read: Read = read_call
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
        return write_call(self.written, name, arguments)


def write_call(written: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call in the format `written`; see `JSONBlockParser`."""
    both = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    alone = json.dumps(dict(arguments), ensure_ascii=False)
    return written.format(name=name, call=both, arguments=alone)


def read_after(head: re.Pattern[str], error: str) -> Read:
    """Return a reader of blocks of a head, with the groups `name` and perhaps `id`, and JSON after it; else the
    error.
    """

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
    read_after(
        re.compile(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
        ),
        "functions.NAME:NUMBER and <|tool_call_argument_begin|> must stand before the arguments",
    ),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_argument_begin|>",),
)
