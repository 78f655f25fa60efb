"""What a rendering is: ids, whose they are, and where each message's are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def joined(parts: Sequence[Rendered]) -> Rendered:
    """Renderings one after the other."""
    ids: list[int] = []
    origin: list[int] = []
    joined: list[tuple[str, int, int]] = []
    for part in parts:
        joined += [(role, start + len(ids), end + len(ids)) for role, start, end in part.spans]
        ids += part.ids
        origin += part.origin
    return Rendered(ids, origin, tuple(joined))
