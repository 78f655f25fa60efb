"""Chooses who computes a run's updates: this process or a plugin's team, this package's learner or a plugin's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import nn

from agentrl_cli.config import Config
from agentrl_cli.config.records import LearnerSettings, MemorySettings
from agentrl_cli.learning.compute import Compute
from agentrl_cli.learning.protocols import ModelCompute, PolicyLearner
from agentrl_cli.models.adapter import ADAPTER_FILE
from agentrl_cli.policies.load import Loaded
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers
from agentrl_cli.trainer.memory_plan import update_memory

if TYPE_CHECKING:
    from agentrl_cli.hooks import HookList


class Team(Protocol):
    """Processes that compute a run's updates together (offer "teams"); this one leads them."""

    @property
    def config(self) -> Config:
        """The settings with which this process loads its model."""

    def compute(self, config: Config, loaded: Loaded) -> ModelCompute:
        """Wait for the others and return the computation of all."""


class LearnerMaker(Protocol):
    """Makes another learner than this package's (offer "learners")."""

    def __call__(
        self, loaded: Loaded, folder: Path, hooks: HookList, report: Callable[[str], None]
    ) -> PolicyLearner:
        """Return the learner. `folder` is the run's; `report` logs a sentence that the user should read."""


def find_learner(config: Config) -> LearnerMaker | None:
    """Return the maker of a plugin's learner that the settings ask for; None for this package's.

    Raises ConfigError or MissingDependency, before anything is opened, if it cannot train with them.
    """
    makers: Iterator[LearnerMaker | None] = (
        resolve("learners", {}, name)(config) for name in offers("learners")
    )
    return next((maker for maker in makers if maker is not None), None)


def make_compute(config: MemorySettings, loaded: Loaded) -> ModelCompute:
    """Return the computation of the only process. `torch.manual_seed` was called with the run's seed."""
    folder, model = needed_folder(loaded), loaded.model
    reference = frozen_reference(config, folder, model)
    memory = update_memory(config, folder, model)
    return Compute(model, LearnerSettings.of(config), reference, **memory)


def needed_folder(loaded: Loaded) -> Path:
    """Return the folder of a model that is trained: it always has one."""
    assert loaded.folder is not None
    return loaded.folder


def frozen_reference(config: MemorySettings, folder: Path, model: nn.Module) -> nn.Module | None:
    """Return a copy of the weights for the KL term; None without such a term, with a moving reference, and with a
    fresh adapter, which can be switched off.

    An adapter that the training starts from is part of the reference.
    """
    adapted = config.adapter.path is not None or (folder / ADAPTER_FILE).is_file()
    bare = hasattr(model, "disable_adapter") and not adapted
    if not config.algo.kl.coef or config.algo.kl.ref_ema or bare:
        return None
    return copy.deepcopy(model).requires_grad_(False).eval()
