"""A rendering: token ids with their origins and the span of each message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl_cli.types import Message, Tokens
from agentrl_cli.types.content import images_of


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
        self, messages: Sequence[Message]
    ) -> Iterator[tuple[str, tuple[Message, ...], Tokens]]:
        """Yield role, messages and tokens of each span; `messages` are those of the whole rendering."""
        left = list(messages)
        for role, start, end in self.spans:
            count = next(
                (n for n, message in enumerate(left) if message["role"] != role), len(left)
            )
            own, left = tuple(left[:count]), left[count:]
            yield role, own, Tokens.from_ids(self.ids[start:end], self.origin[start:end])

    def with_images(
        self, messages: Sequence[Message], images: Sequence[bytes]
    ) -> Iterator[tuple[str, tuple[Message, ...], Tokens, tuple[bytes, ...]]]:
        """Yield `by_role` with the images of each span; `images` are those of all messages in order."""
        done = 0
        for role, own, tokens in self.by_role(messages):
            count = sum(len(images_of(message)) for message in own)
            yield role, own, tokens, tuple(images[done : done + count])
            done += count


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
