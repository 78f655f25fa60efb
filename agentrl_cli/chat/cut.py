"""Cutting tool results that are too long: by tokens, on the side that the settings say, and saying so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl_cli.chat.render import Chat
from agentrl_cli.types import Message, ToolResult


def cut_text(chat: Chat, text: str, limit: int, side: str) -> str:
    """A text of at most about `limit` tokens; `side` (left, middle, right) is cut away, and a mark says so."""
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
    """Tool messages cut to `limit` tokens each, and their results marked `truncated`; user messages are left whole."""
    out, marked = [], list(results)
    for n, message in enumerate(messages):
        if message["role"] != "tool" or not isinstance(message["content"], str):
            out.append(message)
            continue
        text = cut_text(chat, message["content"], limit, side)
        out.append({**message, "content": text})
        if text != message["content"] and n < len(marked):
            marked[n] = replace(marked[n], text=text, truncated=True)
    return out, tuple(marked)
