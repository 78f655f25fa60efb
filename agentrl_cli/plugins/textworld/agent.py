"""A challenge of TextWorld.

solve = TextWorld("tw-coin_collector", options={"level": 2}).solve
"""

from __future__ import annotations

from typing import ClassVar

from agentrl_cli.agents.programs import ForeignWorld


class TextWorld(ForeignWorld):
    """`options` are the challenge's settings, and `commands`: false hides the commands that it knows."""

    name = "textworld"
    needs = "textworld"
    shown = "textworld:tw-coin_collector?level=2"
    tested: ClassVar = {"textworld": "1.7.0"}
    limits: ClassVar = {"max_turns": 24, "max_new_tokens": 64, "max_tokens": 8192}
