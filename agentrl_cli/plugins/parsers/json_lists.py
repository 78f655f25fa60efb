"""Calls as JSON between an opening and a closing text: a list, or one object after the other.

cohere      `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {…}}]<|END_ACTION|>`
command_r   ```Action:\\n```json\\n[{"tool_name": "f", "parameters": {…}}]``` ```
tool_calls  `<tool_calls>[{"name": "f", "arguments": {…}}]</tool_calls>`: Jamba, Apriel; objects by line: MiniMax-M1
nemotron_v2 `<TOOLCALL>[{"name": "f", "arguments": {…}}]</TOOLCALL>`
apertus     `<|tools_prefix|>[{"f": {…}}]<|tools_suffix|>`
functools   `functools[{"name": "f", "arguments": {…}}]`: Firefunction; nothing closes it but the end of the turn
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.chat.parsers.base import (
    ParsedText,
    call,
    call_of,
    find_unopened,
    kind,
    read_json,
    unreadable,
)
from agentrl_cli.types import ToolCall, ToolSchema

SEPARATOR = re.compile(r"[\s,;]*")
DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class JSONListParser:
    """Calls between `opening` and `closing` ("" if the end of the turn closes them).

    `keys` are a call's fields for name and arguments; without them a call is `{NAME: arguments}`.
    """

    name: str
    opening: str
    closing: str
    keys: tuple[str, str] | tuple[()] = ("name", "arguments")
    extra: tuple[tuple[str, Any], ...] = ()
    """Further fields of the example."""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.opening, self.closing) if text)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        # The opening of a syntax without an end may be a word of an answer: there a list must follow it.
        opening = re.compile(re.escape(self.opening) + ("" if self.closing else r"(?=\s*\[)"))
        calls: list[ToolCall] = []
        loose: list[str] = []
        at = 0
        while found := opening.search(text, at):
            before = text[at : found.start()].rstrip()
            loose.append(before.lstrip() if calls else before)
            more, at = self._read(text, found.end())
            calls += more
        if not calls:
            tagged = self.closing.startswith("<")  # a code fence also closes other things
            return ParsedText(
                text, find_unopened(text, (self.opening, self.closing)) if tagged else ()
            )
        loose.append(text[at:].strip())
        return ParsedText("\n".join(part for part in loose if part), tuple(calls))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        call: dict[str, Any] = {name: dict(arguments)}
        if self.keys:
            call = {**dict(self.extra), self.keys[0]: name, self.keys[1]: dict(arguments)}
        return f"{self.opening}{json.dumps([call], ensure_ascii=False)}{self.closing}"

    def _read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """Return the calls from a position on, up to the closing text, and the position after it.

        Values are decoded one by one: a text inside them may contain the closing text.
        """
        values: list[Any] = []
        at = _skip(text, start)
        while at < len(text) or self.closing:
            if self.closing and text.startswith(self.closing, at):
                break
            try:
                value, at = DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                if self.closing or not values:
                    return self._read_broken(text, start, at)
                break  # nothing marks the end of the calls, and the turn continues
            values += value if isinstance(value, list) else [value]
            at = _skip(text, at)
        empty = call(raw=text[start:at], error="the list of calls is empty")
        return [self._call(value) for value in values] or [empty], at + len(self.closing)

    def _read_broken(self, text: str, start: int, at: int) -> tuple[list[ToolCall], int]:
        """Return the error of a list that cannot be read from `at` on, and the position after the list."""
        key = self.keys[0] if self.keys else ""
        end = text.find(self.closing, start) if self.closing else len(text)
        if at >= end:
            error = f"cut off: no {self.closing} after the calls"
            return [unreadable(text[start:], error, key)], len(text)
        error = read_json(text[at:end])[1] or "not valid JSON"
        return [unreadable(text[start:end], error, key)], end + len(self.closing)

    def _call(self, value: Any) -> ToolCall:
        raw = json.dumps(value, ensure_ascii=False)
        if self.keys:
            return call_of(value, raw, self.keys[1:], self.keys[0])
        if not isinstance(value, dict) or len(value) != 1:
            error = f"must be a JSON object of one name and its arguments, not {kind(value)}"
            return call(raw=raw, error=error)
        ((name, arguments),) = value.items()
        return call_of({"name": name, "arguments": arguments}, raw)


def _skip(text: str, at: int) -> int:
    """Return the position after what separates values."""
    found = SEPARATOR.match(text, at)
    return found.end() if found else at


TOOL_NAME = ("tool_name", "parameters")
COHERE = JSONListParser(
    "cohere", "<|START_ACTION|>", "<|END_ACTION|>", TOOL_NAME, (("tool_call_id", "0"),)
)
COMMAND_R = JSONListParser("command_r", "Action:\n```json\n", "```", TOOL_NAME)
TOOL_CALLS = JSONListParser("tool_calls", "<tool_calls>", "</tool_calls>")
NEMOTRON_V2 = JSONListParser("nemotron_v2", "<TOOLCALL>", "</TOOLCALL>")
APERTUS = JSONListParser("apertus", "<|tools_prefix|>", "<|tools_suffix|>", ())
FUNCTOOLS = JSONListParser("functools", "functools", "")
