"""Drafts: how a turn may go on, looked up in earlier text, so that one step can draw several tokens of it.

A draft is fed behind the newest token, as further rows over the same block table. Each row's token is then drawn as
ever, by its own logits and its own random number; where it is the draft, the row behind it is right, too. So every
token is the one that a plain step would have drawn, and a wrong draft costs a row.

What followed the same few tokens before, in this episode, its siblings or the steps before, is the draft. It is fed
where it is right often enough for the step's rows: a row is cheap beside the rest of a step of few rows, and dear in
one of many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl_cli.inference.request import Request
from agentrl_cli.types import Int32

ORDER = 4
"""Tokens that a draft follows."""
MOST = 3
"""Tokens of a draft."""
ENTRIES = 2**16
"""Continuations that are kept; the older half is dropped with each new half."""
PRIOR = (0.15, 0.35, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95)
"""Share of right drafts by their level, the bits of how often that continuation was seen without another, at first."""
ROWS = 16.0
"""Rows that cost as much as the rest of a step."""
MEMORY = 200
"""Drafted tokens by which a level's share of right ones is known."""
PATIENCE = 2000
"""Tokens after which drafts that are never right are given up, for as many tokens."""
LEAST = 0.02
"""Share of tokens that drafts must bring for that not to happen."""

Key = tuple[int, ...]


class Drafts:
    """Continuations of the tokens that one policy has seen, and how often they were right."""

    def __init__(self) -> None:
        self.accepted = self.fed = 0
        """Drafted tokens that were right, and all."""
        self._new: dict[Key, list[int]] = {}
        self._old: dict[Key, list[int]] = {}
        self._right = list(PRIOR)
        self._seen = self._won = self._pause = 0

    def learn(self, ids: Sequence[int] | Int32, start: int) -> None:
        """Keep what follows what in a text, from a position on."""
        if self._pause:
            return
        tokens = np.asarray(ids[max(0, start - ORDER) :]).tolist()
        for key, token in zip(
            zip(*(tokens[n:] for n in range(ORDER)), strict=False), tokens[ORDER:], strict=False
        ):
            known = self._new.get(key) or self._old.get(key)
            if known is None:
                self._new[key] = [token, 0]
                continue
            if known[0] == token:
                known[1] += 1
            elif known[1]:
                known[1] //= 2
            else:
                known[0] = token
            self._new[key] = known
        if len(self._new) > ENTRIES // 2:
            self._old, self._new = self._new, {}

    def worth(self, rows: int) -> bool:
        """Whether any draft would be fed in a step of so many rows."""
        return not self._pause and max(self._right) * (rows + ROWS) >= rows

    def propose(self, request: Request, most: int, rows: int) -> list[tuple[int, int]]:
        """Return a draft of at most `most` tokens, each with its level, for a step of so many rows."""
        how = request.sampling
        if how.allow is not None or how.repetition_penalty != 1.0:
            return []
        key, found, chance = tuple(request.tail(ORDER)), [], 1.0
        for _ in range(min(most, MOST)):
            known = self._new.get(key) or self._old.get(key)
            if known is None:
                break
            level = min(known[1].bit_length(), len(PRIOR) - 1)
            chance *= self._right[level]
            if chance * (rows + ROWS) < rows:
                break
            found.append((known[0], level))
            key = (*key[1:], known[0])
        return found

    def report(self, request: Request, draft: Sequence[tuple[int, int]], drawn: int) -> None:
        """Count the right ones of a draft that was fed in a step that drew so many tokens of its request."""
        for (token, level), found in zip(draft, request.out[-drawn:], strict=False):
            right = token == found
            self._right[level] += (right - self._right[level]) / MEMORY
            self._won += right
        self.accepted += drawn - 1
        self.fed += len(draft)

    def rest(self, drawn: int) -> None:
        """Count the tokens of a step; give drafts up for a while where they bring nothing."""
        if self._pause:
            self._pause = max(0, self._pause - drawn)
            return
        self._seen += drawn
        if self._seen >= PATIENCE:
            self._pause = PATIENCE if self._won < LEAST * self._seen else 0
            self._seen = self._won = 0
            # Levels that were given up are tried again.
            self._right = list(map(max, self._right, PRIOR))
