"""The stream of rows: a seed and a number decide a row, whatever was drawn before."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import chains, games, mistakes, programs, sessions, tasks
from .rows import Row

FAMILIES: dict[Callable[[random.Random], Row], float] = {
    tasks.one_call: 16,
    tasks.conversion: 3,
    tasks.choose: 4,
    tasks.from_list: 3,
    tasks.record: 5,
    tasks.two_steps: 6,
    tasks.parallel: 3,
    mistakes.corrected: 6,
    mistakes.fails: 2,
    tasks.no_tool: 5,
    tasks.look_up: 2,
    programs.expression: 5,
    programs.program: 3,
    programs.loaded: 3,
    programs.secret: 2,
    programs.function: 2,
    chains.chain: 18,
    sessions.bound: 14,
    sessions.session: 18,
    sessions.bind_drill: 9,
    games.play: 8,
}
"""Family → how often it is drawn, relative to the others."""


def row(seed: int, number: int) -> Row:
    """Row `number` of a seed's stream."""
    rng = random.Random(f"bundled {seed} {number}")
    return rng.choices(list(FAMILIES), list(FAMILIES.values()))[0](rng)


def drill(seed: int, number: int) -> Row:
    """A row that only copies, only chooses among tools or only binds arguments, in place of row `number`."""
    rng = random.Random(f"drill {seed} {number}")
    drills = {tasks.drill: 40, sessions.choose_drill: 22, sessions.bind_drill: 38}
    return rng.choices(list(drills), list(drills.values()))[0](rng)
