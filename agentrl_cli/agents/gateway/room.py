"""Whether a request can fit into a context, found before anything of it is rendered.

A refusal takes no more work than reading the request. One that passes may still be too long by a few times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from agentrl_cli.agents.gateway.messages import canonical
from agentrl_cli.agents.gateway.request import RequestError, bad, too_long
from agentrl_cli.chat.tokenizer import BaseTokenizer
from agentrl_cli.types import Message, ToolSchema

ORDINARY = 4
"""Characters per token, up to which a text is not counted: most texts have fewer."""
SLACK = 2
"""How many times too long a text must be counted to be refused: slices are tokenized otherwise than the whole."""
SLICE = 2**14
"""Characters that are tokenized at a time to count a text, or 64 times the longest token."""
MOST_CHANGES = 32
"""Changes of role between two answers: each costs a rendering."""


def require_room(
    tokenizer: BaseTokenizer,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    room: int,
    most: int,
) -> None:
    """Raise RequestError if messages and tools are too long for `room` of a context's `most` tokens."""
    if len(messages) > room:
        raise too_long(most, f"{len(messages)} messages")
    if sum(1 for _ in groupby(messages, lambda message: message["role"])) > MOST_CHANGES:
        raise bad(
            f"Between two answers the role changes at most {MOST_CHANGES} times here.", "messages"
        )
    calls = [
        canonical(call["function"])
        for message in messages
        for call in message.get("tool_calls", ())
    ]
    texts = [
        *(message["content"] for message in messages),
        *calls,
        *([canonical(tools)] if tools else []),
    ]
    require_short(tokenizer, texts, room, most)


def require_short(
    tokenizer: BaseTokenizer, texts: Sequence[str], room: int, most: int, param: str = "messages"
) -> None:
    """Raise RequestError if texts are too long for `room` of a context's `most` tokens."""
    length = sum(map(len, texts))
    if length > room * tokenizer.longest:
        raise _refusal(length, most, param)
    if length > room * ORDINARY:
        left = room * SLACK
        for piece in _slices(texts, max(SLICE, 64 * tokenizer.longest)):
            left -= len(tokenizer.encode(piece))
            if left < 0:
                raise _refusal(length, most, param)


def _refusal(length: int, most: int, param: str) -> RequestError:
    return too_long(most, f"{length} characters, which take more", param)


def _slices(texts: Sequence[str], size: int) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), size):
            yield text[start : start + size]
