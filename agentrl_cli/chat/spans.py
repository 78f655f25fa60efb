"""A rendering: token ids with their origins and the span of each message.

Which characters are content of which message, and which the template's own, is only for origins (colours in replay,
counts of observation tokens): no loss depends on it, as none of these tokens is trained. Found by rendering the
conversation again with a marker in place of each content.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_cli.chat.tokenizer import Offsets
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message, Origin, Tokens
from agentrl_cli.types.content import images_of

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


def locate(
    text: str, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> list[Region]:
    """Return the regions of `text` that are contents of `messages`, in order. `render` renders other messages the same
    way.
    """
    contents: list[tuple[int, str]] = []
    marked = [_mark(message, index, contents) for index, message in enumerate(messages)]
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
        # Templates write a content unchanged, trimmed, or as JSON text.
        quoted = json.dumps(content, ensure_ascii=False)
        trimmed = content.strip(), content.rstrip(), content.lstrip("\n"), content.strip("\n")
        variants = (content, *trimmed, quoted, quoted[1:-1])
        found = next((v for v in variants if text.startswith(v + literal, position)), None)
        if found is None:
            return regions + _search(text, contents[len(regions) :], position)
        regions.append((position, position + len(found), index))
        position += len(found) + len(literal)
    return regions


def _mark(message: Message, index: int, contents: list[tuple[int, str]]) -> Message:
    """Return the message with a marker in place of each text of its content; the texts are added to `contents`."""

    def mark(text: Any) -> Any:
        if not isinstance(text, str) or not text:
            return text
        contents.append((index, text))
        return f"{MARK}{index}{MARK}"

    content = message.get("content")
    if isinstance(content, list):
        parts = [
            {**part, "text": mark(part["text"])} if "text" in part else part for part in content
        ]
        return {**message, "content": parts}
    return {**message, "content": mark(content)} if content else dict(message)


def origins(offsets: Offsets, regions: Sequence[Region], messages: Sequence[Message]) -> list[int]:
    """Return the origin of each token: of the region it starts in, else TEMPLATE."""
    result = np.full(len(offsets), Origin.TEMPLATE, np.int8)
    starts = np.array([start for start, _ in offsets], np.int64)
    for start, end, index in regions:
        inside = (starts >= start) & (starts < end)
        result[inside] = ORIGINS.get(str(messages[index].get("role")), Origin.USER)
    return [int(origin) for origin in result]


def spans(
    messages: Sequence[Message], ends: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> tuple[tuple[str, int, int], ...]:
    """Return the token spans of consecutive messages of one role; `ends` are the messages' ends in characters."""
    found: list[tuple[str, int, int]] = []
    token = 0
    for index, (message, end) in enumerate(zip(messages, ends, strict=True)):
        role = str(message.get("role"))
        last = index == len(messages) - 1
        if not last and str(messages[index + 1].get("role")) == role:
            continue
        start = token
        while token < len(offsets) and (last or offsets[token][0] < end):
            token += 1
        found.append((role, start, token))
    return tuple(found)


def find_ends(text: str, messages: Sequence[Message], render: Callable[[int], str]) -> list[int]:
    """Return where each message ends in `text` (characters): the prefix shared with a rendering of those up to it.

    `render` renders so many of the messages. `spans` joins messages of one role: ends between them are not used.
    """
    ends: list[int] = []
    for count in range(1, len(messages)):
        ends.append(ends[-1] if ends else 0)
        if messages[count].get("role") != messages[count - 1].get("role"):
            with contextlib.suppress(TemplateError):
                ends[-1] = max(shared_prefix(render(count), text), ends[-1])
    return [*ends, len(text)] if messages else []


def shared_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of leading items (characters, tokens) that two sequences share."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a binary search: slices compare fast
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _search(text: str, contents: Sequence[tuple[int, str]], position: int = 0) -> list[Region]:
    """Return the fallback if a template moves or rewrites contents: the next occurrence of each, if any."""
    regions: list[Region] = []
    for index, content in contents:
        needle = content.strip()
        start = text.find(needle, position) if needle else -1
        if start >= 0:
            position = start + len(needle)
            regions.append((start, position, index))
    return regions


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of a piece of conversation. `ids` and `origin` have the same length n."""

    ids: list[int]
    origin: list[int]
    """An `Origin` per token; SYSTEM, USER and TOOL for contents, TEMPLATE for everything around them."""
    spans: tuple[tuple[str, int, int], ...]
    """(role, start, end): the tokens of consecutive messages of one role; together they cover [0, n)."""
    text: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def by_role(
        self, messages: Sequence[Message], images: Sequence[bytes] = ()
    ) -> Iterator[tuple[str, tuple[Message, ...], Tokens, tuple[bytes, ...]]]:
        """Yield role, messages, tokens and images of each span, of those of the whole rendering in order."""
        left, shown = list(messages), list(images)
        for role, start, end in self.spans:
            last = next((n for n, one in enumerate(left) if one["role"] != role), len(left))
            own = tuple(left[:last])
            count = sum(len(images_of(message)) for message in own)
            tokens = Tokens.from_ids(self.ids[start:end], self.origin[start:end])
            yield role, own, tokens, tuple(shown[:count])
            left, shown = left[last:], shown[count:]


def join_renderings(parts: Sequence[Rendered]) -> Rendered:
    """Return one rendering of several that follow each other."""
    ids: list[int] = []
    origin: list[int] = []
    spans: list[tuple[str, int, int]] = []
    for part in parts:
        spans += [(role, start + len(ids), end + len(ids)) for role, start, end in part.spans]
        ids += part.ids
        origin += part.origin
    return Rendered(ids, origin, tuple(spans))
