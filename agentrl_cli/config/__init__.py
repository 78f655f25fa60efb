"""Configuration: settings (models), layers and the sources of values (load), printing (show)."""

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.config.load import Sources, inside, load_config
from agentrl_cli.config.models import (
    Config,
    LoraConfig,
    ModelConfig,
    SandboxConfig,
    StoreConfig,
    TaskConfig,
)
from agentrl_cli.config.rollout import RolloutConfig
from agentrl_cli.config.train import EvalConfig, TrainConfig
from agentrl_cli.types.section import Section

__all__ = [
    "AlgoConfig",
    "Config",
    "EvalConfig",
    "LoraConfig",
    "ModelConfig",
    "RolloutConfig",
    "SandboxConfig",
    "Section",
    "Sources",
    "StoreConfig",
    "TaskConfig",
    "TrainConfig",
    "inside",
    "load_config",
]
