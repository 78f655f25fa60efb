"""The settings that a room needs: one frozen record for each, made from all of them where a process begins.

Commands, `runtime` and `build_trainer` see `Config`; the functions they call get one of these, or a section.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from agentrl_cli.config.algo import AlgoConfig
from agentrl_cli.config.models import (
    LoraConfig,
    ModelConfig,
    StoreConfig,
    TaskConfig,
)
from agentrl_cli.config.remote import RemoteConfig
from agentrl_cli.config.rollout import RolloutConfig
from agentrl_cli.config.train import EvalConfig, TrainConfig


@dataclass(frozen=True)
class Settings:
    """Base of the records; their fields are sections and keys of `Config`, by the same names."""

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Return this room's part of all settings, or of a record that has more."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values; a mapping changes settings of a section."""
        return dataclasses.replace(
            self,
            **{
                name: getattr(self, name).replace(**value) if isinstance(value, Mapping) else value
                for name, value in changes.items()
            },
        )


@dataclass(frozen=True)
class PolicySettings(Settings):
    """Of what loads a model and samples from it."""

    model: ModelConfig
    adapter: LoraConfig
    rollout: RolloutConfig
    remote: RemoteConfig
    train: TrainConfig
    seed: int
    deterministic: bool


@dataclass(frozen=True)
class MemorySettings(PolicySettings):
    """Of the memory plan: what samples, and what learns beside it."""

    algo: AlgoConfig


@dataclass(frozen=True)
class LearnerSettings(Settings):
    """Of what turns a step's episodes into an update."""

    algo: AlgoConfig
    train: TrainConfig
    rollout: RolloutConfig


@dataclass(frozen=True)
class TrainerSettings(LearnerSettings):
    """Of the training loop and of its parts."""

    model: ModelConfig
    task: TaskConfig
    rewards: dict[str, float]
    eval: EvalConfig
    store: StoreConfig
    seed: int
    deterministic: bool
