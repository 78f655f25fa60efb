"""Trees of turns: root-to-leaf paths, and the token sequence and training mask of each.

Turns are known here by their index in the episode and by their spans of tokens. `Episode` has the properties that
people use; their computations are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Spans = Sequence[tuple[int, int]]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Branch:
    """One path of an episode's turns from a root to a leaf: the tokens that the model saw when it wrote the leaf."""

    turns: tuple[int, ...]
    """Indices of its turns, root first."""
    positions: NDArray[np.int64]
    """[n] place of each of its tokens in `Episode.tokens`."""
    trained: Bool
    """[n] the sampled tokens that no earlier branch has."""

    def __len__(self) -> int:
        return len(self.positions)


def path_to(parents: Sequence[int], index: int) -> tuple[int, ...]:
    """Return the indices from the root to a turn, itself included."""
    path = []
    while index >= 0:
        path.append(index)
        index = parents[index]
    return tuple(reversed(path))


def tree_branches(
    paths: Sequence[tuple[int, ...]], spans: Spans, sampled: Bool
) -> tuple[Branch, ...]:
    """Return the token sequence of each path; a turn's sampled tokens are trained on the first path that has it."""
    seen: set[int] = set()
    out = []
    for path in paths:
        positions = [np.arange(*spans[index]) for index in path]
        trained = [
            sampled[spans[index][0] : spans[index][1]] & (index not in seen) for index in path
        ]
        out.append(Branch(path, np.concatenate(positions), np.concatenate(trained)))
        seen.update(path)
    return tuple(out)


def split_trained(
    branches: Sequence[Branch], sampled: Bool, values: NDArray[Any]
) -> list[NDArray[Any]]:
    """Return values of an episode's sampled tokens, in token order, as an array per branch over its trained tokens."""
    whole = np.empty(len(sampled), values.dtype)
    whole[sampled] = values
    return [whole[branch.positions[branch.trained]] for branch in branches]
