"""Calls whose arguments are one JSON object: in blocks, or as Mistral and Harmony write them.

hermes           `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes and Qwen
kimi_k2          a section of `functions.f:0` and the arguments between tokens
deepseek         a section of calls: `function<｜tool▁sep｜>f` and a code fence (V3, R1), or `f<｜tool▁sep｜>{…}` (V3.1)
mistral          `[TOOL_CALLS]` and a JSON list of calls; from v11 on `[TOOL_CALLS]NAME[ARGS]{…}`, repeated
harmony          gpt-oss: `to=functions.NAME`, the channel `commentary`, and JSON after `<|message|>`

In Harmony a model begins after `<|start|>assistant` and may write `analysis` messages first; the recipient stands
before or after the channel, and the answer in the channel `final`.
https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import (
    BlockParser,
    ParsedText,
    Read,
    call,
    call_of,
    call_with,
    kind,
    read_json,
    unreadable,
)
from agentrl_cli.types import ToolCall, ToolSchema


def write_call(written: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call in the format `written`, with `{name}` and `{arguments}`, or `{call}` for the object of both."""
    both = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    alone = json.dumps(dict(arguments), ensure_ascii=False)
    return written.format(name=name, call=both, arguments=alone)


def read_after(head: re.Pattern[str], error: str) -> Read:
    """Return a reader of blocks of a head, with the groups `name` and perhaps `id`, and JSON after it; else the
    error.
    """

    def read(raw: str, tools: Sequence[ToolSchema] = ()) -> ToolCall:
        found = head.match(raw)
        name = found["name"].strip() if found else ""
        if found is None or not name:
            return call(raw=raw, error=error)
        id_ = (found.groupdict().get("id") or "").strip()
        own = re.fullmatch(r"[\w.:\-]{1,64}", id_)
        return call_with(name, raw[found.end() :], raw, id_ if own else "")

    return read


SEP = "<｜tool▁sep｜>"


def _read_deepseek(raw: str, tools: Sequence[ToolSchema] = ()) -> ToolCall:
    head, found, tail = raw.partition(SEP)
    name, text = head.strip(), tail
    if not found:
        return call(raw=raw, error=f"{SEP} between type and name is missing")
    if name == "function":
        fenced = re.fullmatch(r"(?s)\s*(\S+)\s*```(?:json)?\n(.*?)\n?```\s*", tail)
        if not fenced:
            name = tail.split("\n", 1)[0].strip()
            return call(
                name, raw=raw, error="after the name the arguments must follow in a ```json block"
            )
        name, text = fenced[1], fenced[2]
    return call_with(name, text, raw) if name else call(raw=raw, error="the function has no name")


HERMES = BlockParser(
    "hermes",
    ("<tool_call>", "</tool_call>"),
    partial(write_call, "<tool_call>\n{call}\n</tool_call>"),
)

DEEPSEEK = BlockParser(
    "deepseek",
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    partial(
        write_call,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}{{name}}\n```json\n{{arguments}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    _read_deepseek,
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    inner=(SEP,),
)

# https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
KIMI_K2 = BlockParser(
    "kimi_k2",
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    partial(
        write_call,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    read_after(
        re.compile(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
        ),
        "functions.NAME:NUMBER and <|tool_call_argument_begin|> must stand before the arguments",
    ),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_argument_begin|>",),
)


OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser:
    """`[TOOL_CALLS] [{"name": "f", "arguments": {…}}]`; only the end of the turn closes it."""

    name = "mistral"
    markers: tuple[str, ...] = (OPEN, ARGS, CALL_ID)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        content, *blocks = text.split(OPEN)
        calls = [one for block in blocks for one in _read_mistral(block)]
        return ParsedText(content.rstrip() if blocks else content, tuple(calls))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{OPEN} {json.dumps([{'name': name, 'arguments': dict(arguments)}], ensure_ascii=False)}"


def _read_mistral(raw: str) -> list[ToolCall]:
    if ARGS in raw:
        head, _, body = raw.partition(ARGS)
        name, _, id_ = (part.strip() for part in head.partition(CALL_ID))
        if name:
            return [call_with(name, body, raw, _own_id(id_))]
        return [call(raw=raw, error=f"the tool's name must stand between {OPEN} and {ARGS}")]
    value, error = read_json(raw.strip())
    if error:
        return [unreadable(raw, error)]
    if not isinstance(value, list):
        return [
            call(raw=raw, error=f"after {OPEN} a JSON list of calls must follow, not {kind(value)}")
        ]
    if not value:
        return [call(raw=raw, error="the list of calls is empty")]
    return [
        replace(call_of(item, json.dumps(item, ensure_ascii=False)), id=_own_id(item))
        for item in value
    ]


def _own_id(item: Any) -> str:
    """Return the model's own id, which the result must repeat; templates reject all but nine letters and digits."""
    text = item.get("id") if isinstance(item, dict) else item
    return text if isinstance(text, str) and re.fullmatch(r"[A-Za-z0-9]{9}", text) else ""


MISTRAL = MistralParser()


_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
RECIPIENT = re.compile(r"\bto=(\S*?)(?=<\||\s|$)")
_ROLE = re.compile(rf"\A(?:{re.escape(_START)})?assistant(?=[\s<])")
"""Begins every message of a turn but the first, whose header is in the generation prompt."""
IN_CHANNEL = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w+)")


class HarmonyParser:
    """` to=functions.f<|channel|>commentary json<|message|>{…}`; `<|call|>` ends the turn."""

    name = "harmony"
    markers: tuple[str, ...] = (_CHANNEL, _CONSTRAIN, _MESSAGE)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        calls: list[ToolCall] = []
        answers: list[str] = []
        thinking: list[str] = []
        for part in re.split(r"<\|(?:end|call|return)\|>", text):
            part = _ROLE.sub("", part)
            header, opened, body = part.partition(_MESSAGE)
            recipient = RECIPIENT.search(header)
            if recipient and recipient[1].partition(".")[0] == "functions":
                name = recipient[1].partition(".")[2]
                if not name:
                    found = call(raw=part, error="the tool's name must follow to=functions.")
                elif not opened:
                    error = f"cut off: no {_MESSAGE} and arguments before the turn ended"
                    found = call(name, raw=part, error=error)
                else:
                    found = call_with(name, body, part)
                calls.append(found)
                continue
            channel = IN_CHANNEL.search(header) if opened else None
            if channel is not None and channel[1] == "analysis":
                thinking.append(body)
            elif part.strip():
                answers.append(part if channel is None else body)
        return ParsedText("\n".join(answers), tuple(calls), "\n".join(thinking))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps(dict(arguments), ensure_ascii=False)
        return f" to=functions.{name}{_CHANNEL}commentary json{_MESSAGE}{body}"


HARMONY = HarmonyParser()
