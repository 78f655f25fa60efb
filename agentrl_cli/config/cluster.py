"""The settings of the ranks that train together; a plugin adds those of workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.types.section import Positive, Section


class ClusterConfig(Section):
    """Several processes, on this machine or on many."""

    gpus: Positive | None = Field(
        default=None,
        description="GPUs of each machine that train together, one process each; null: one process",
    )
    ranks: Positive = Field(
        default=1,
        description="processes of each machine that train together on the CPU, in place of `gpus`",
    )
    nodes: Positive = Field(
        default=1, description="machines that train together; see `agentrl train --node 1`"
    )
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
    def size(self) -> int:
        """Ranks of all machines together."""
        return self.nodes * max(self.gpus or 1, self.ranks)
