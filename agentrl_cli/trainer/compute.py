"""What trains a run's model: this process alone, or several ranks (see ranks.py)."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from agentrl_cli.config import Config
from agentrl_cli.learning.compute import Compute
from agentrl_cli.models.adapter import ADAPTER_FILE
from agentrl_cli.policies.load import Loaded, load_weights
from agentrl_cli.trainer.memory_plan import checkpoints, row_tokens, sets_aside

if TYPE_CHECKING:
    from agentrl_cli.errors import RunFailed
    from agentrl_cli.learning.ranked import Lead, Ranks, Replica


class Others(Protocol):
    """The other ranks, as rank 0 meets them (ranks.Team)."""

    base: Path

    def connect(self, config: Config, loaded: Loaded, *, recompute: bool, aside: bool) -> Ranks:
        """Wait for them and give them the model to load."""
        ...

    def fault(self, wait: float = 0.0) -> RunFailed | None:
        """Return the error of a rank that was lost; waits so many seconds for the report."""
        ...


def make_compute(config: Config, loaded: Loaded, team: Others | None) -> Compute | Lead:
    """Return the compute of rank 0, or of the only process. `torch.manual_seed` was called with the run's seed."""
    assert loaded.folder is not None
    recompute = checkpoints(config, loaded.folder, loaded.model)
    aside = sets_aside(config, loaded.folder, loaded.model)
    if team is None:
        reference = frozen_reference(config, loaded.folder, loaded.model)
        rows = partial(row_tokens, config, loaded.folder, loaded.model)
        return Compute(
            loaded.model, config, reference, checkpoint=recompute, aside=aside, row_tokens=rows
        )
    from agentrl_cli.learning.ranked import Lead

    ranks = team.connect(config, loaded, recompute=recompute, aside=aside)
    own = (
        trainee(config, torch.device("cpu"), loaded.folder, loaded.name, team.base)
        if config.sharded
        else loaded.model
    )
    local = make_replica(
        config, loaded.folder, own, ranks, loaded.model, recompute=recompute, aside=aside
    )
    return Lead(local, team.fault)


def make_replica(
    config: Config,
    folder: Path,
    own: nn.Module,
    ranks: Ranks,
    whole: nn.Module | None = None,
    *,
    recompute: bool,
    aside: bool,
) -> Replica:
    """Return a rank's part: `own` is the model that it trains, `whole` rank 0's, which samples and is saved."""
    torch.manual_seed(config.seed)
    reference = frozen_reference(config, folder, own)
    if not config.sharded:
        from agentrl_cli.learning.ranked import Replica

        return Replica(own, config, reference, ranks, checkpoint=recompute, aside=aside)
    from agentrl_cli.learning.sharded import Sharded

    return Sharded(own, config, reference, ranks, whole=whole, checkpoint=recompute)


def trainee(config: Config, device: torch.device, folder: Path, name: str, base: Path) -> nn.Module:
    """Return the model that is trained, loaded to a device."""
    settings = config.model.model_copy(update={"device": str(device)})
    return load_weights(
        folder, name, config.model_copy(update={"model": settings}), base=base, trainable=True
    )


def frozen_reference(config: Config, folder: Path, model: nn.Module) -> nn.Module | None:
    """Return a copy of the weights for the KL term; None without such a term, with a moving reference, with a fresh
    adapter, which can be switched off, and for TRL, which loads its own.

    An adapter that the training starts from is part of the reference.
    """
    adapted = config.adapter.path is not None or (folder / ADAPTER_FILE).is_file()
    elsewhere = config.algo.ref_ema or config.trainer.kind == "trl"
    if not config.algo.kl_coef or elsewhere or (hasattr(model, "disable_adapter") and not adapted):
        return None
    reference: nn.Module = copy.deepcopy(model).requires_grad_(False).eval()
    return reference
