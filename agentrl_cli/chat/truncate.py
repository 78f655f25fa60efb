"""Truncates tool results that are too long: by tokens, on the configured side, with a mark at the cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.spans import Rendered
from agentrl_cli.types import Message, ToolResult


def cut_text(chat: Chat, text: str, limit: int, side: str) -> str:
    """Return a text of at most about `limit` tokens; `side` (left, middle, right) is replaced by a mark."""
    ids = chat.tokenizer.encode(text)
    if len(ids) <= limit:
        return text
    mark = f"[… {len(ids) - limit} tokens cut …]"
    if side == "left":
        return mark + chat.decode(ids[-limit:])
    if side == "right":
        return chat.decode(ids[:limit]) + mark
    head = limit // 2
    return chat.decode(ids[:head]) + mark + chat.decode(ids[len(ids) - (limit - head) :])


def cut_results(
    chat: Chat, messages: Sequence[Message], results: Sequence[ToolResult], limit: int, side: str
) -> tuple[list[Message], tuple[ToolResult, ...]]:
    """Return tool messages cut to `limit` tokens of text each, and their results marked `truncated`.

    User messages and images are left whole.
    """
    out, marked, number = [], list(results), -1
    for message in messages:
        number += message["role"] == "tool"
        if message["role"] != "tool":
            out.append(message)
            continue
        content = message["content"]
        plain = isinstance(content, str)  # else images, and the text after them
        parts = [{"type": "text", "text": content}] if plain else content
        whole = "".join(part.get("text", "") for part in parts)
        text = cut_text(chat, whole, limit, side)
        cut = [{**part, "text": text} if part.get("type") == "text" else part for part in parts]
        out.append({**message, "content": text if plain else cut})
        if text != whole and number < len(marked):
            marked[number] = replace(marked[number], text=text, truncated=True)
    return out, tuple(marked)


def fit_results(
    chat: Chat,
    messages: Sequence[Message],
    results: Sequence[ToolResult],
    render: Callable[[list[Message]], Rendered],
    *,
    limit: int,
    side: str,
    room: int,
    shrink: bool,
) -> tuple[list[Message], tuple[ToolResult, ...], Rendered]:
    """Return `cut_results` and the rendering of its messages; with `shrink`, cut further until that fits into `room`.

    It may still not fit: user messages are never cut, and a few tokens of a result always stay.
    """
    out, marked = cut_results(chat, messages, results, limit, side)
    delta = render(out)
    for smaller in (max(4, limit - (len(delta) - room)), limit // 4, 4) if shrink else ():
        if len(delta) <= room:
            break
        out, marked = cut_results(chat, messages, results, smaller, side)
        delta = render(out)
    return out, marked, delta
