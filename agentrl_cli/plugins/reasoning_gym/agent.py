"""A family of reasoning-gym.

solve = ReasoningGym("chain_sum", options={"max_terms": 3, "seed": 1}).solve
"""

from __future__ import annotations

from typing import ClassVar

from agentrl_cli.agents.programs import ForeignWorld


class ReasoningGym(ForeignWorld):
    """`options` are the family's configuration, and `system`: a prompt of the package by name, or a text."""

    name = "reasoning-gym"
    needs = "reasoning-gym"
    shown = "reasoning-gym:FAMILY?size=500&seed=0"
    tested: ClassVar = {"reasoning-gym": "0.1.25"}
    limits: ClassVar = {"max_turns": 1, "max_new_tokens": 192, "max_tokens": 2048}
