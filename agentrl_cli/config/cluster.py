"""The settings of the workers that make episodes, and of the ranks that train together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.types.section import Positive, Seconds, Section


class ClusterConfig(Section):
    """What makes the episodes, and what trains: this process, or others on this machine or on many."""

    kind: Literal["here", "processes", "ray"] = Field(
        default="here",
        description="here: this process; processes: local processes; ray: actors on a Ray cluster (extra ray)",
    )
    workers: Positive = Field(
        default=1,
        description="processes or ray: how many workers; each runs rollout.concurrency episodes at once",
    )
    address: str = Field(
        default="auto",
        description="ray: the cluster's address, host:6379 or ray://host:10001; auto: the one this machine belongs to;"
        " local: a new one on this machine",
    )
    worker_gpus: float = Field(
        default=0.0,
        ge=0,
        description="processes or ray: GPUs of each worker; ray takes shares, 0.5",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="ray: what each worker reserves besides GPUs, custom resources included; {} is one CPU",
    )
    patience: Seconds = Field(
        default=60.0,
        description="seconds without a sign of life after which a worker is replaced and its episodes are given again",
    )
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
