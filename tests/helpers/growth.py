"""How the cost of work grows with its size, which a slow machine does not change."""

import math
import time
from collections.abc import Callable

# The least of so many measurements counts for each size: what others take from the processor only
# adds.
ROUNDS = 8
# Below every bound that a test asks for: more rounds would change no answer.
ENOUGH = 1.29


def exponent(work: Callable[[int], object], size: int, times: int = 8) -> float:
    """Return the power of the size with which CPU time grows up to `times` as much: 1 is linear, 2 quadratic."""
    least = {size: math.inf, times * size: math.inf}
    found = math.inf
    for _ in range(ROUNDS):
        for each, before in least.items():
            began = time.thread_time()
            work(each)
            least[each] = min(before, time.thread_time() - began)
        found = math.log(max(least[times * size], 1e-9) / max(least[size], 1e-9), times)
        if found < ENOUGH:
            break
    return found
