"""A Gymnasium environment in text form.

solve = Gym("FrozenLake-v1", options={"size": 3, "is_slippery": False}).solve
"""

from __future__ import annotations

from typing import ClassVar

from agentrl_cli.agents.programs import ForeignWorld


class Gym(ForeignWorld):
    """`options` are those of `gymnasium.make`; `goal` replaces the prompt's sentences about the task."""

    name = "gym"
    needs = "gymnasium minigrid"
    shown = "gym:FrozenLake-v1?is_slippery=false, or gym:my_file.py:make"
    tested: ClassVar = {"gymnasium": "1.4.0", "minigrid": "3.2.0"}
    limits: ClassVar = {"max_turns": 16, "max_new_tokens": 48, "max_tokens": 2048}
