"""An OpenEnv environment behind an address.

solve = OpenEnv("http://127.0.0.1:8000").solve
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from agentrl_cli.agents.programs import ForeignWorld


class OpenEnv(ForeignWorld):
    """`options`: `goal`, the prompt's first sentences; `size`, the number of rows; anything else is for `reset`."""

    name = "openenv"
    worker = Path(__file__).with_name("worker.py")
    needs = "websockets"
    shown = "openenv:http://127.0.0.1:8000, or openenv:http://host:8000?size=200&goal=…"
    tested: ClassVar = {"openenv": "0.10.0"}
    limits: ClassVar = {"max_turns": 16, "max_new_tokens": 96, "max_tokens": 4096}
