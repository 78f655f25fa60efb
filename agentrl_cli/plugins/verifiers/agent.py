"""A taskset of verifiers: its rows, and an agent that plays them.

solve = Verifiers("wordle").solve
"""

from __future__ import annotations

from agentrl_cli.agents.programs import ForeignAgent


class Verifiers(ForeignAgent):
    """`options` are its environment's configuration: `taskset`, its roles …"""

    name = "verifiers"
    needs = "verifiers uv"
    options_under = "taskset"
    shown = "verifiers:PACKAGE"
