"""A game of TextArena.

solve = TextArena("Sudoku-v0-very-easy").solve
"""

from __future__ import annotations

from typing import ClassVar

from agentrl_cli.agents.programs import ForeignWorld


class TextArena(ForeignWorld):
    """`options` are the game's, and in games of several players `opponent` and `eval_opponent`.

    `self` (the model plays all players), `random`, moves that repeat, or a frozen model. `eval_opponent` (random) plays
    the rows outside the training split.
    """

    name = "textarena"
    needs = "textarena"
    shown = "textarena:Sudoku-v0?tool=true"
    tested: ClassVar = {"textarena": "0.7.4"}
    others: ClassVar = ("self", "random")
    limits: ClassVar = {"max_turns": 24, "max_new_tokens": 128, "max_tokens": 8192}

    @property
    def models(self) -> list[str]:
        """The frozen models that are opponents."""
        named = [self.options.get(key, "random") for key in ("opponent", "eval_opponent")]
        return [one for one in named if isinstance(one, str) and one not in self.others]
