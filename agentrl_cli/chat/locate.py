"""Which characters of a rendering are whose: content of messages, or the template's own.

Only for origins (colours in replay, counts of observation tokens): no loss depends on it, since nothing found here is
ever trained. Found by rendering the conversation again with a marker in place of each content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentrl_cli.chat.tokenizer import Offsets
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message, Origin

MARK = f"zq{secrets.token_hex(6)}c"
"""A word that no conversation contains."""

Region = tuple[int, int, int]
"""Start, end (characters), index of the message."""

ORIGINS = {
    "system": Origin.SYSTEM,
    "developer": Origin.SYSTEM,
    "user": Origin.USER,
    "tool": Origin.TOOL,
    "assistant": Origin.FORCED,
}
"""Role to the origin of its content in a prompt. An assistant message of a prompt was not sampled here."""


def locate(text: str, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> list[Region]:
    """The regions of `text` that are contents of `messages`, in order. `render` gives the text for other contents."""
    texts = [message.get("content") for message in messages]
    contents = [(index, content) for index, content in enumerate(texts) if isinstance(content, str) and content]
    marked = [dict(message) for message in messages]
    for index, _ in contents:
        marked[index]["content"] = f"{MARK}{index}{MARK}"
    try:
        pieces = re.split(rf"{MARK}(\d+){MARK}", render(marked))
    except TemplateError:
        pieces = []
    literals, order = pieces[0::2], [int(number) for number in pieces[1::2]]
    if order != [index for index, _ in contents]:
        return _search(text, contents)
    regions: list[Region] = []
    position = len(literals[0])
    for (index, content), literal in zip(contents, literals[1:], strict=True):
        found = next((v for v in _variants(content) if text.startswith(v + literal, position)), None)
        if found is None:
            return regions + _search(text, contents[len(regions) :], position)
        regions.append((position, position + len(found), index))
        position += len(found) + len(literal)
    return regions


def origins(offsets: Offsets, regions: Sequence[Region], messages: Sequence[Message]) -> list[int]:
    """Origin of each token: of the region it starts in, else TEMPLATE."""
    result = np.full(len(offsets), Origin.TEMPLATE, np.int8)
    starts = np.array([start for start, _ in offsets], np.int64)
    for start, end, index in regions:
        inside = (starts >= start) & (starts < end)
        result[inside] = ORIGINS.get(str(messages[index].get("role")), Origin.USER)
    return [int(origin) for origin in result]


def shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading items (characters, tokens) two sequences share."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices compare fast: halve instead of walking
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _variants(content: str) -> tuple[str, ...]:
    """What templates make of a content: itself, trimmed, or JSON text."""
    quoted = json.dumps(content, ensure_ascii=False)
    return content, content.strip(), content.rstrip(), content.lstrip("\n"), content.strip("\n"), quoted, quoted[1:-1]


def _search(text: str, contents: Sequence[tuple[int, str]], position: int = 0) -> list[Region]:
    """The fallback where a template moves or rewrites contents: the next place where each occurs, if any."""
    regions: list[Region] = []
    for index, content in contents:
        needle = content.strip()
        start = text.find(needle, position) if needle else -1
        if start >= 0:
            position = start + len(needle)
            regions.append((start, position, index))
    return regions
