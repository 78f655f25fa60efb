"""Configuration: settings (models), layers and the sources of values (load), printing (show).

Its names are imported when they are used: a command that reads one file of settings builds no model of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_WHERE = {
    "AlgoConfig": "agentrl_cli.config.algo",
    "Config": "agentrl_cli.config.models",
    "EvalConfig": "agentrl_cli.config.train",
    "LoraConfig": "agentrl_cli.config.models",
    "ModelConfig": "agentrl_cli.config.models",
    "RolloutConfig": "agentrl_cli.config.rollout",
    "SandboxConfig": "agentrl_cli.config.models",
    "Section": "agentrl_cli.types.section",
    "Sources": "agentrl_cli.config.load",
    "StoreConfig": "agentrl_cli.config.models",
    "TaskConfig": "agentrl_cli.config.models",
    "TrainConfig": "agentrl_cli.config.train",
    "inside": "agentrl_cli.config.load",
    "load_config": "agentrl_cli.config.load",
}
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


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_WHERE[name]), name)
    return value
