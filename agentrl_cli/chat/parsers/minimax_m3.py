"""MiniMax M3: arguments as nested elements, every tag after `]<]minimax[>[`.

A list is `<item>` elements. Types come from the tool's schema: the template writes values without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText, call, typed_as
from agentrl_cli.chat.parsers.blocks import parse_blocks
from agentrl_cli.types import ToolCall, ToolSchema

NS = "]<]minimax[>["
SECTION = f"{NS}<tool_call>", f"{NS}</tool_call>"
BLOCK = f'{NS}<invoke name="', f"{NS}</invoke>"
TAG = re.compile(re.escape(NS) + r"<(/?)([^<>\s]+)>")
DEPTH = 64
"""How deep elements may be nested."""


class MiniMaxM3Parser:
    """`<tool_call><invoke name="f"><x>1</x></invoke></tool_call>`, each tag after the namespace's token."""

    name = "minimax_m3"
    markers: tuple[str, ...] = (NS, *SECTION, *BLOCK)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        return parse_blocks(text, BLOCK, partial(_read, tools=tools), SECTION)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        elements = "".join(
            f"{NS}<{key}>{_write(value)}{NS}</{key}>" for key, value in arguments.items()
        )
        return f'{SECTION[0]}\n{BLOCK[0]}{name}">{elements}{BLOCK[1]}\n{SECTION[1]}'


def _write(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(
            f"{NS}<{key}>{_write(item)}{NS}</{key}>"
            for key, item in value.items()
            if item is not None
        )
    if isinstance(value, (list, tuple)):
        return "".join(f"{NS}<item>{_write(item)}{NS}</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _read(raw: str, tools: Sequence[ToolSchema]) -> ToolCall:
    name, found, body = raw.partition('">')
    if not found or not re.fullmatch(r"[^\s\"<>]+", name):
        return call(raw=raw, error=f'{BLOCK[0]}NAME"> must begin a call')
    function: Mapping[str, Any] = next(
        (t["function"] for t in tools if t["function"]["name"] == name), {}
    )
    schema = {"type": "object", **function.get("parameters", {})}
    try:
        pieces = _pieces(body)
        value = _value(pieces, schema, "", 0)
    except ValueError as error:
        return call(name, raw=raw, error=str(error))
    return call(name, value if isinstance(value, dict) else {}, raw=raw)


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield ("text", …), ("open", name), ("close", name), and ("end", "") last."""
    done = 0
    for match in TAG.finditer(text):
        if match.start() > done:
            yield "text", text[done : match.start()]
        yield ("close" if match[1] else "open"), match[2]
        done = match.end()
    if done < len(text):
        yield "text", text[done:]
    yield "end", ""


def _value(
    pieces: Iterator[tuple[str, str]], schema: Mapping[str, Any], inside: str, depth: int
) -> Any:
    """Return the value up to the tag that closes `inside`. Raises ValueError with the fault."""
    if depth > DEPTH:
        raise ValueError(f"elements are nested deeper than {DEPTH}")
    text, items = "", []
    for kind, what in pieces:
        if kind == "text":
            text += what
        elif kind == "open":
            properties: Mapping[str, Any] = schema.get("properties", {})
            inner = (
                schema.get("items", {})
                if schema.get("type") == "array"
                else properties.get(what, {})
            )
            items.append(
                (what, _value(pieces, inner if isinstance(inner, Mapping) else {}, what, depth + 1))
            )
        elif what != inside:
            wanted = f"{NS}</{inside}>" if inside else "the end of the call"
            raise ValueError(
                f"{wanted} is missing"
                if kind == "end"
                else f"{wanted} must come before {NS}</{what}>"
            )
        else:
            break
    if not items:
        known: dict[str, Any] = {"array": [], "object": {}}
        return (
            known[schema["type"]]
            if schema.get("type") in known and not text.strip()
            else typed_as(text, schema)
        )
    if text.strip():
        raise ValueError(f"there is text beside elements: {text.strip()[:40]!r}")
    listed = schema.get("type") == "array" or (
        schema.get("type") != "object" and {name for name, _ in items} == {"item"}
    )
    return [item for _, item in items] if listed else dict(items)


PARSER = MiniMaxM3Parser()
