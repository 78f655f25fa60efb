"""The stream of rows: a seed and a number decide a row, whatever was drawn before."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import mistakes, programs, tasks
from .rows import Row

FAMILIES: dict[Callable[[random.Random], Row], float] = {
    tasks.one_call: 26,
    tasks.conversion: 4,
    tasks.choose: 8,
    tasks.from_list: 4,
    tasks.record: 7,
    tasks.two_steps: 11,
    tasks.parallel: 5,
    mistakes.corrected: 7,
    mistakes.fails: 2,
    tasks.no_tool: 5,
    tasks.look_up: 2,
    programs.expression: 6,
    programs.program: 4,
    programs.loaded: 4,
    programs.secret: 2,
    programs.function: 3,
}
"""Family → how often it is drawn, in per cent."""


def row(seed: int, number: int) -> Row:
    """Row `number` of a seed's stream."""
    rng = random.Random(f"bundled {seed} {number}")
    return rng.choices(list(FAMILIES), list(FAMILIES.values()))[0](rng)


def drill(seed: int, number: int) -> Row:
    """A row that only copies, in place of row `number`."""
    return tasks.drill(random.Random(f"drill {seed} {number}"))
