"""The trainer: sample, learn, report, save.

Every step is made from the store: finished episodes of a step's jobs are taken from there and not generated again. So a
resume loads the last checkpoint and walks through the same loop: steps since then are applied again from their
episodes, a partial step is completed, and the run continues. Data order and seeds are functions of (seed, step) alone.
"""

from __future__ import annotations

from agentrl_cli.trainer.build import build_trainer
from agentrl_cli.trainer.loop import Trainer

__all__ = ["Trainer", "build_trainer"]
