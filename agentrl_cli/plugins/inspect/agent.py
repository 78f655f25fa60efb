"""A task of Inspect: its samples as rows, and an agent that plays them.

solve = Inspect("inspect_evals", task="gsm8k", python="/envs/inspect/bin/python").solve
"""

from __future__ import annotations

from agentrl_cli.agents.programs import ForeignAgent


class Inspect(ForeignAgent):
    """`options` are the task's arguments; `score` names the scorer that is the reward, `NAME` or `NAME/KEY`."""

    name = "inspect"
    needs = "inspect_ai openai"
    shown = "inspect:PACKAGE@TASK"
