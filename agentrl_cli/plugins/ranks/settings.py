"""The section `ranks` of agentrl.yaml."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentrl_cli.types.section import Count, Positive, Section

if TYPE_CHECKING:
    from agentrl_cli.config import Config


class RanksConfig(Section):
    """GPUs and machines that train together."""

    gpus: Positive | None = Field(
        default=None,
        description="GPUs of each machine that train together, one process each; null: one process",
    )
    processes: Positive = Field(
        default=1,
        description="processes of each machine that train together on the CPU, in place of `gpus`",
    )
    nodes: Positive = Field(
        default=1, description="machines that train together; see `agentrl train --node 1`"
    )
    node: Count = Field(default=0, description="number of this machine; 0 holds the run")
    rendezvous: str = Field(
        default="",
        description="HOST:PORT of the first machine, where the ranks of several machines meet",
    )
    shard: Literal["auto", "none", "full"] = Field(
        default="auto",
        description="full: FSDP2, weights, gradients and optimizer state are spread over the ranks; none: every rank"
        " has all of them; auto: full, but none with an adapter or an optimizer other than adamw",
    )

    @property
    def here(self) -> int:
        """Ranks of one machine."""
        return max(self.gpus or 1, self.processes)

    @property
    def size(self) -> int:
        """Ranks of all machines together."""
        return self.nodes * self.here


def check(config: Config) -> None:
    """Raise ValueError for an algorithm that works in one process."""
    if config.algo.kl.ref_ema and config.section(RanksConfig).size > 1:
        raise ValueError(
            "algo.kl.ref_ema works in one process: leave out --gpus, --ranks and --nodes, or the average"
        )


def is_sharded(config: Config) -> bool:
    """Whether the trained weights are spread over several ranks (FSDP2)."""
    ranks = config.section(RanksConfig)
    if ranks.size == 1 or ranks.shard == "none":
        return False
    return ranks.shard == "full" or (
        not config.adapter.enabled and config.train.optimizer.name == "adamw"
    )


def loading_settings(config: Config, device: str = "") -> Config:
    """Return the settings by which a rank loads the model: float32 if it is sharded, whatever it is computed in."""
    dtype = "float32" if is_sharded(config) else config.model.dtype
    return config.replace(model={"dtype": dtype, "device": device or config.model.device})
