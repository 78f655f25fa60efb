"""Calls in blocks between an opening and a closing marker: the splitting that most syntaxes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agentrl_cli.chat.parsers.base import ParsedText, call
from agentrl_cli.types import ToolCall

Markers = tuple[str, str]
"""Opening and closing text."""
MOST_ARGUMENTS = 200
"""Of a call whose arguments are written as tags."""


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


def parse_section(text: str, section: Markers, block: Markers, read: Callable[[str], ToolCall]) -> ParsedText:
    """Blocks inside of sections, which have markers of their own. Blocks without a section are read all the same."""
    content, opened, rest = text.partition(section[0])
    if not opened:
        return parse_blocks(text, *block, read)
    calls: list[ToolCall] = []
    loose: list[str] = []
    while opened:  # no recursion: a model that repeats itself opens thousands
        loose.append(content.rstrip("\n") if not loose else content.strip("\n"))
        inner, closed, after = rest.partition(section[1])
        found = list(parse_blocks(inner, *block, read).calls)
        found = found or [call(raw=inner, error=f"there is no {block[0]} in the list of calls")]
        if not closed and not found[-1].error:
            found[-1] = replace(found[-1], arguments=None, error=f"cut off: no {section[1]} at its end")
        calls += found
        content, opened, rest = after.partition(section[0])
    loose.append(content.strip("\n"))
    return ParsedText("\n".join(part for part in loose if part), tuple(calls))


def too_many(body: str, opening: str) -> str | None:
    """What is wrong with a call that opens more arguments than any tool has: each is looked for to the text's end."""
    return f"more than {MOST_ARGUMENTS} arguments" if body.count(opening) > MOST_ARGUMENTS else None
