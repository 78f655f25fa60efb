"""Calls in blocks between an opening and a closing marker: the splitting that most syntaxes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl_cli.chat.parsers.base import ParsedText, call
from agentrl_cli.types import ToolCall

Markers = tuple[str, str]
"""Opening and closing text."""
Read = Callable[[str], ToolCall | Sequence[ToolCall]]
"""Makes the call, or several, of the text between two markers."""


def parse_blocks(
    text: str, block: Markers, read: Read, section: Markers | None = None
) -> ParsedText:
    """Return the content, and the calls of every block; one that is not closed, or never opened, is an error.

    Text before, between and after the blocks is content. With a `section` the blocks are inside sections, which have
    markers of their own; without any section they are read too.
    """
    if section is None or section[0] not in text:
        return _blocks(text, block, read)
    content, opened, rest = text.partition(section[0])
    calls: list[ToolCall] = []
    loose = [content.rstrip("\n")]
    while opened:  # a loop, not recursion: a model that repeats itself opens thousands
        inner, closed, after = rest.partition(section[1])
        found = list(_blocks(inner, block, read).calls)
        found = found or [call(raw=inner, error=f"no {block[0]} in the list of calls")]
        if not closed and not found[-1].error:
            found[-1] = replace(
                found[-1], arguments=None, error=f"cut off: no {section[1]} at its end"
            )
        calls += found
        content, opened, rest = after.partition(section[0])
        loose.append(content.strip("\n"))
    return ParsedText("\n".join(part for part in loose if part), tuple(calls))


def _blocks(text: str, block: Markers, read: Read) -> ParsedText:
    opening, closing = block
    before, *blocks = text.split(opening)
    if not blocks:
        return ParsedText(text, find_unopened(text, block))
    calls: list[ToolCall] = []
    loose = [before.rstrip("\n")]
    for number, inner in enumerate(blocks):
        raw, closed, after = inner.partition(closing)
        made = read(raw)
        found = [made] if isinstance(made, ToolCall) else list(made)
        if not closed:
            where = (
                "before the turn ended"
                if number == len(blocks) - 1
                else f"before the next {opening}"
            )
            error = f"cut off: no {closing} {where}"
            found = [replace(found[0], arguments=None, raw=raw, error=error)]
        calls += found
        loose.append(after.strip("\n"))
    return ParsedText("\n".join(part for part in loose if part), tuple(calls))


def find_unopened(text: str, block: Markers) -> tuple[ToolCall, ...]:
    """Return the error for a text without the opening marker that contains the closing one; empty if it does not."""
    opening, closing = block
    return (
        (call(raw=text, error=f"{closing} without {opening} before it"),) if closing in text else ()
    )
