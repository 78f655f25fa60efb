"""A game of TextArena.

solve = TextArena("Sudoku-v0-very-easy").solve
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from agentrl_cli.agents.programs import ForeignWorld


class TextArena(ForeignWorld):
    """`options` are the game's, and `opponent`: the moves of the other players, in turn; random ones without it."""

    name = "textarena"
    worker = Path(__file__).with_name("worker.py")
    needs = "textarena"
    shown = "textarena:Sudoku-v0?tool=true"
    tested: ClassVar = {"textarena": "0.7.4"}
    limits: ClassVar = {"max_turns": 24, "max_new_tokens": 128, "max_tokens": 8192}
