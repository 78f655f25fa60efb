"""A job, an attempt to be made, and the seeds of everything that is drawn."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from agentrl_cli.types import Task


@dataclass(frozen=True, slots=True)
class Job:
    """An attempt to be made. The same job with the same weights gives the same episode."""

    task: Task
    seed: int
    sample: int = 0
    group_id: str | None = None
    step: int | None = None
    run_id: str | None = None
    kind: str = "rollout"
    slot: int = -1  # see Sampling.slot


def seed_of(*parts: object) -> int:
    """63 bits that depend on the parts alone: seeds of steps, tasks, samples and turns."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
