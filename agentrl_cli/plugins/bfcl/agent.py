"""A multi-turn category of the Berkeley Function Calling Leaderboard.

solve = BFCL("multi_turn_base", options={"turns": 1}).solve
"""

from __future__ import annotations

from typing import ClassVar

from agentrl_cli.agents.programs import ForeignWorld


class BFCL(ForeignWorld):
    """`options`: `turns`, how many of the user's are played; `tools: needed`, only the functions of the solution."""

    name = "bfcl"
    needs = "--no-deps bfcl_eval==2026.3.23 mpmath==1.3.0"
    shown = "bfcl:multi_turn_base?turns=1&tools=needed"
    tested: ClassVar = {"bfcl-eval": "2026.3.23"}
    limits: ClassVar = {"max_turns": 40, "max_new_tokens": 256, "max_tokens": 16384}
