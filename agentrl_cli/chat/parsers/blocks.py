"""Calls in blocks between an opening and a closing marker: the splitting that most syntaxes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agentrl_cli.chat.parsers.base import ParsedText, call
from agentrl_cli.types import ToolCall


def parse_blocks(text: str, opening: str, closing: str, read: Callable[[str], ToolCall]) -> ParsedText:
    """Content and one call for every block. A block that is not closed, or closed without being opened, is an error.

    `read` makes a call of the text between the markers. Text before, between and after the blocks is content.
    """
    before, *blocks = text.split(opening)
    if not blocks:
        if closing in text:
            return ParsedText(text, (call(raw=text, error=f"{closing} without {opening} before it"),))
        return ParsedText(text)
    calls: list[ToolCall] = []
    loose = [before.rstrip("\n")]
    for number, block in enumerate(blocks):
        raw, closed, after = block.partition(closing)
        found = read(raw)
        if not closed:
            where = "before the turn ended" if number == len(blocks) - 1 else f"before the next {opening}"
            found = replace(found, arguments=None, error=f"cut off: no {closing} {where}")
        calls.append(found)
        loose.append(after.strip("\n"))
    return ParsedText("\n".join(part for part in loose if part), tuple(calls))
