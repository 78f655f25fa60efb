"""Mistral: `[TOOL_CALLS]` and a JSON list of calls; from v11 on `[TOOL_CALLS]NAME[ARGS]{…}`, repeated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.chat.parsers.base import (
    ParsedText,
    call,
    call_of,
    call_with,
    kind,
    read_json,
    unreadable,
)
from agentrl_cli.types import ToolCall, ToolSchema

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser:
    """`[TOOL_CALLS] [{"name": "f", "arguments": {…}}]`; only the end of the turn closes it."""

    name = "mistral"
    markers: tuple[str, ...] = (OPEN, ARGS, CALL_ID)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        content, *blocks = text.split(OPEN)
        calls = [one for block in blocks for one in _read(block)]
        return ParsedText(content.rstrip() if blocks else content, tuple(calls))

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{OPEN} {json.dumps([{'name': name, 'arguments': dict(arguments)}], ensure_ascii=False)}"


def _read(raw: str) -> list[ToolCall]:
    if ARGS in raw:
        return [_read_named(raw)]
    value, error = read_json(raw.strip())
    if error:
        return [unreadable(raw, error)]
    if not isinstance(value, list):
        return [
            call(raw=raw, error=f"after {OPEN} a JSON list of calls must follow, not {kind(value)}")
        ]
    if not value:
        return [call(raw=raw, error="the list of calls is empty")]
    return [_with_id(call_of(item, json.dumps(item, ensure_ascii=False)), item) for item in value]


def _with_id(found: ToolCall, item: Any) -> ToolCall:
    return replace(found, id=_own_id(item.get("id"))) if isinstance(item, dict) else found


def _own_id(text: Any) -> str:
    """Return the model's own id, which the result must repeat; templates reject all but nine letters and digits."""
    return text if isinstance(text, str) and re.fullmatch(r"[A-Za-z0-9]{9}", text) else ""


def _read_named(raw: str) -> ToolCall:
    head, _, body = raw.partition(ARGS)
    name, _, id_ = (part.strip() for part in head.partition(CALL_ID))
    if not name:
        return call(raw=raw, error=f"the tool's name must stand between {OPEN} and {ARGS}")
    return call_with(name, body, raw, _own_id(id_))


PARSER = MistralParser()
