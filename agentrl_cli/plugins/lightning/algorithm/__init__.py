"""Algorithms: `VERL`, `MiniGRPO`, `TRLTrainer` train with this package; `APO`, `Baseline`, `@algo` use the queue."""

from agentrl_cli.plugins.lightning.algorithm import base as apo
from agentrl_cli.plugins.lightning.algorithm.base import (
    APO,
    Algorithm,
    Baseline,
    FastAlgorithm,
    algo,
)
from agentrl_cli.plugins.lightning.algorithm.training import GRPO, MiniGRPO, TRLTrainer
from agentrl_cli.plugins.lightning.algorithm.verl import VERL

__all__ = [
    "APO",
    "GRPO",
    "VERL",
    "Algorithm",
    "Baseline",
    "FastAlgorithm",
    "MiniGRPO",
    "TRLTrainer",
    "algo",
    "apo",
]
