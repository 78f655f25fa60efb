"""The trainer: sample, score, update, log, save.

Every step is made from the store: what a step's jobs already left there as finished episodes is not generated again. So
a resume loads the last checkpoint and walks through the same loop: steps since then are applied again from their
episodes, a partial step is finished, and then it goes on. Data order and seeds are functions of (seed, step) alone.
"""

from __future__ import annotations

from agentrl_cli.trainer.loop import Trainer

__all__ = ["Trainer"]
