"""The stream of rows: a seed and a number decide a row, whatever was drawn before."""

from __future__ import annotations

import random
from collections.abc import Callable

from agentrl_cli.sft.recipe import programs, tasks
from agentrl_cli.sft.recipe.rows import Row

FAMILIES: dict[Callable[[random.Random], Row], float] = {
    tasks.one_call: 36,
    tasks.from_list: 5,
    tasks.record: 8,
    tasks.two_steps: 11,
    tasks.parallel: 7,
    tasks.corrected: 5,
    tasks.no_tool: 6,
    tasks.look_up: 3,
    programs.expression: 7,
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
