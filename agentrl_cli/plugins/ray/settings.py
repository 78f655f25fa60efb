"""The section `cluster` of agentrl.yaml."""

from __future__ import annotations

from pydantic import Field, field_validator

from agentrl_cli.errors import NotFound
from agentrl_cli.registry import names
from agentrl_cli.types.section import Positive, Seconds, Section

LINKS = {
    "processes": "agentrl_cli.plugins.ray.processes:open_links",
    "ray": "agentrl_cli.plugins.ray.ray_actors:open_links",
}
"""Kind of worker to a context manager (config, base) that yields a list of functions, each of which returns the `Link`
of a worker, and a function that makes trained weights loadable by all of them, or None."""


class ClusterConfig(Section):
    """Workers that make the episodes."""

    kind: str = Field(
        default="here",
        description="here: this process; processes: local processes; ray: actors on a Ray cluster (extra ray);"
        " or a name of the entry point agentrl.workers, or module:object",
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
        description="seconds without a sign of life after which a worker is replaced and its episodes are given again;"
        " as many times longer as this machine is slowed down by others",
    )

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        if "GPU" in resources:
            raise ValueError("GPUs are those of cluster.worker_gpus: leave out GPU")
        return resources

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        known = ("here", *LINKS)
        if kind not in known and ":" not in kind and kind not in names("workers", LINKS):
            problem = NotFound.of("kind of worker", kind, known)
            raise ValueError(f"{problem.message} {problem.hint}")
        return kind
