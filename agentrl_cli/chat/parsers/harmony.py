"""Harmony, of gpt-oss: `to=functions.NAME`, the channel `commentary`, and JSON after `<|message|>`.

A model begins after `<|start|>assistant` and may write `analysis` messages first; the recipient stands before or
after the channel, and the answer in the channel `final`. https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_with
from agentrl_cli.types import ToolCall, ToolSchema

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = re.compile(r"<\|(?:end|call|return)\|>")
RECIPIENT = re.compile(r"\bto=(\S*?)(?=<\||\s|$)")
ROLE = re.compile(rf"\A(?:{re.escape(START)})?assistant(?=[\s<])")
"""Begins every message of a turn but the first, whose header is in the generation prompt."""
IN_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")


class HarmonyParser:
    """` to=functions.f<|channel|>commentary json<|message|>{…}`; `<|call|>` ends the turn."""

    name = "harmony"
    markers: tuple[str, ...] = (CHANNEL, CONSTRAIN, MESSAGE)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        calls: list[ToolCall] = []
        answers: list[str] = []
        thinking: list[str] = []
        for part in ENDS.split(text):
            part = ROLE.sub("", part)
            header, opened, body = part.partition(MESSAGE)
            recipient = RECIPIENT.search(header)
            if recipient and recipient[1].partition(".")[0] == "functions":
                calls.append(_read(recipient[1], opened, body, part))
                continue
            channel = IN_CHANNEL.search(header) if opened else None
            if channel is not None and channel[1] == "analysis":
                thinking.append(body)
            elif part.strip():
                answers.append(part if channel is None else body)
        return ParsedText("\n".join(answers), tuple(calls), "\n".join(thinking))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps(dict(arguments), ensure_ascii=False)
        return f" to=functions.{name}{CHANNEL}commentary json{MESSAGE}{body}"


def _read(recipient: str, opened: str, body: str, raw: str) -> ToolCall:
    name = recipient.partition(".")[2]
    if not name:
        return call(raw=raw, error="the tool's name must follow to=functions.")
    if not opened:
        return call(
            name, raw=raw, error=f"cut off: no {MESSAGE} and arguments before the turn ended"
        )
    return call_with(name, body, raw)


PARSER = HarmonyParser()
