"""Texts of an environment: notes that open an episode, results that are cut."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_cli.types import Message
from agentrl_cli.types.content import with_text


def add_opening(prompt: list[Message], opening: Sequence[str]) -> list[Message]:
    """Return the prompt, with the tools' notes on the episode's state after the last user message."""
    if not opening:
        return prompt
    last = next((n for n in reversed(range(len(prompt))) if prompt[n]["role"] == "user"), None)
    text = "\n\n".join(opening)
    if last is None:
        return [*prompt, {"role": "user", "content": text}]
    prompt[last] = {**prompt[last], "content": with_text(prompt[last]["content"], text)}
    return prompt


MARK = 40
"""Maximum characters of the mark of a cut."""


def clip_text(text: str, limit: int, side: str) -> str:
    """Return a text with `limit` of its characters; `side` (left, middle, right) is cut away and marked."""
    mark = f"[… {len(text) - limit} characters cut …]"
    head = {"left": 0, "right": limit}.get(side, limit // 2)
    return text[:head] + mark + text[len(text) - (limit - head) :]
