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
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, call_of, kind, read_json
from agentrl_cli.chat.parsers.blocks import unopened
from agentrl_cli.types import ToolCall, ToolSchema

SEPARATOR = re.compile(r"[\s,;]*")
DECODER = json.JSONDecoder()


class JSONListParser:
    """Calls between `opening` and `closing` ("" if the end of the turn closes them).

    `keys` are a call's fields for name and arguments; without them a call is `{NAME: arguments}`. `extra` are further
    fields of the example.
    """

    def __init__(
        self,
        name: str,
        opening: str,
        closing: str,
        keys: tuple[str, str] | None = ("name", "arguments"),
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.markers: tuple[str, ...] = tuple(text for text in (opening, closing) if text)
        self._opening, self._closing, self._keys, self._extra = (
            opening,
            closing,
            keys,
            dict(extra or {}),
        )

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        before, opened, rest = self._split(text)
        if not opened:
            tagged = self._closing.startswith("<")  # a code fence also closes other things
            return ParsedText(
                text, unopened(text, (self._opening, self._closing)) if tagged else ()
            )
        calls: list[ToolCall] = []
        loose = [before.rstrip()]
        while opened:
            found, rest = self._read(rest)
            calls += found
            before, opened, rest = self._split(rest)
            loose.append(before.strip())
        return ParsedText("\n".join(part for part in loose if part), tuple(calls))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        call: dict[str, Any] = {name: dict(arguments)}
        if self._keys:
            call = {**self._extra, self._keys[0]: name, self._keys[1]: dict(arguments)}
        return f"{self._opening}{json.dumps([call], ensure_ascii=False)}{self._closing}"

    def _split(self, text: str) -> tuple[str, str, str]:
        """Return the text before the opening, the opening, and the rest.

        If nothing closes it, a list must follow it.
        """
        if self._closing:
            return text.partition(self._opening)
        found = re.search(rf"{re.escape(self._opening)}(?=\s*\[)", text)
        return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")

    def _read(self, text: str) -> tuple[list[ToolCall], str]:
        """Return the calls at the start of a text, up to the closing text, and the rest after it."""
        values: list[Any] = []
        at = _skip(text, 0)
        while at < len(text) and not (self._closing and text.startswith(self._closing, at)):
            try:
                value, at = DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                if not self._closing and values:
                    break  # nothing marks the end of the calls, and the turn continues
                return self._broken(text, at)
            values += value if isinstance(value, list) else [value]
            at = _skip(text, at)
        if self._closing and at >= len(text):
            return self._broken(text, at)
        if not values:
            return [call(raw=text[:at], error="the list of calls is empty")], text[
                at + len(self._closing) :
            ]
        return [self._call(value) for value in values], text[at + len(self._closing) :]

    def _broken(self, text: str, at: int) -> tuple[list[ToolCall], str]:
        raw, closed, rest = text.partition(self._closing) if self._closing else (text, "yes", "")
        if not closed or at >= len(raw):
            return [
                call(
                    self._named(text),
                    raw=text,
                    error=f"cut off: no {self._closing} after the calls",
                )
            ], ""
        return [
            call(self._named(raw), raw=raw, error=read_json(raw[at:])[1] or "not valid JSON")
        ], rest

    def _call(self, value: Any) -> ToolCall:
        raw = json.dumps(value, ensure_ascii=False)
        if self._keys:
            return call_of(value, raw, self._keys[1:], self._keys[0])
        if not isinstance(value, dict) or len(value) != 1:
            return call(
                raw=raw,
                error=f"must be a JSON object of one name and its arguments, not {kind(value)}",
            )
        ((name, arguments),) = value.items()
        if not isinstance(arguments, dict):
            return call(
                name, raw=raw, error=f"the arguments must be a JSON object, not {kind(arguments)}"
            )
        return call(name, arguments, raw=raw)

    def _named(self, raw: str) -> str:
        """Return the name in a list that cannot be read, if it can be found."""
        key = self._keys[0] if self._keys else ""
        found = (
            re.search(rf'"{key}"\s*:\s*"([^"\\]{{1,64}})"', raw)
            if key
            else re.search(r'\{\s*"([^"\\]{1,64})"', raw)
        )
        return found[1] if found else ""


def _skip(text: str, at: int) -> int:
    """Return the position after what separates values."""
    found = SEPARATOR.match(text, at)
    return found.end() if found else at


COHERE = JSONListParser(
    "cohere",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    ("tool_name", "parameters"),
    {"tool_call_id": "0"},
)
COMMAND_R = JSONListParser("command_r", "Action:\n```json\n", "```", ("tool_name", "parameters"))
TOOL_CALLS = JSONListParser("tool_calls", "<tool_calls>", "</tool_calls>")
NEMOTRON_V2 = JSONListParser("nemotron_v2", "<TOOLCALL>", "</TOOLCALL>")
APERTUS = JSONListParser("apertus", "<|tools_prefix|>", "<|tools_suffix|>", None)
FUNCTOOLS = JSONListParser("functools", "functools", "")
