"""How work grows with its size, told without a clock on the wall: two sizes, in one run, by CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMES = 16
"""How many times larger the second size is."""
LINEAR = 64
"""Growth that no linear work reaches (16, and twice that by chance) and quadratic work exceeds (256)."""


def growth(work: Callable[[int], object], size: int, tries: int = 3) -> float:
    """How many times more CPU time `work(16 * size)` takes than `work(size)`, by the best of some tries."""
    small, large = (min(_cpu(work, n) for _ in range(tries)) for n in (size, TIMES * size))
    return large / max(small, 1e-6)


def _cpu(work: Callable[[int], object], size: int) -> float:
    began = time.process_time()
    work(size)
    return time.process_time() - began
