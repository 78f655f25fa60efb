"""What the process of the run and its workers exchange, and the protocol of a worker.

Messages are tuples: a name, then plain values or the dataclasses of this module.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl_cli.config import Config
from agentrl_cli.errors import RunFailed
from agentrl_cli.rollout.context import Attempted
from agentrl_cli.rollout.job import Job
from agentrl_cli.store import RunRow

if TYPE_CHECKING:
    from torch import nn

Message = tuple[Any, ...]
Emit = Callable[[Message], None]
Weights = Any
"""A safetensors file or its bytes, or a link's reference to these; Published: the servers have them.

None: those that the model's own files have.
"""
Save = Callable[["nn.Module", str], Weights]
"""Makes the trained weights of a model, under a version's name, what workers can load."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is made from."""

    config: Config
    base: Path
    """The project folder, which the worker must see."""
    spec: str
    """The model, as `load_policy` takes it."""
    trainable: bool
    threads: int = 0
    """Threads of torch; 0: its own choice."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a rollout differs from the configuration's."""

    temperature: float
    with_tools: bool
    shaped: bool
    """Whether the reward parts of training (`Shaping`) are added."""
    run: RunRow | None


@dataclass(frozen=True, slots=True)
class Order:
    """A job for a worker. `number` is new each time that a job is given."""

    number: int
    job: Job
    variant: Variant
    version: str
    """The weights that it is to begin with, or newer ones."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Where a worker runs, and with what."""

    node: str
    pid: int
    python: str
    packages: dict[str, str]
    clock: float
    hashes: dict[str, str]
    """Hash of each pack's code."""


@dataclass(slots=True)
class Status:
    """What a worker does now; a sign of life."""

    version: str = ""
    running: tuple[int, ...] = ()
    """Numbers of its orders."""
    finished: int = 0
    tokens: int = 0
    """Sampled tokens so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of its policy since the last status."""


@dataclass(frozen=True, slots=True)
class Finished:
    """An order that ended."""

    number: int
    attempted: Attempted


class WorkerLost(RunFailed):
    """A worker died, hangs, or cannot be reached."""


class Worker(Protocol):
    """Makes episodes."""

    async def load(self, version: str, weights: Weights) -> None:
        """Sample with other weights from the next turn on; running turns end with the weights they began with.

        Raises WorkerLost.
        """

    def run(self, orders: Sequence[Order]) -> AsyncGenerator[Finished, None]:
        """Return the ended episodes of some orders, first come first. Raises what an attempt raises, WorkerLost."""

    async def cancel(self, numbers: Sequence[int]) -> None:
        """Stop orders; unknown numbers are ignored."""

    async def close(self) -> None:
        """Stop everything and free it."""


class Link(Protocol):
    """Carries messages to one worker and back. Every method but `kill` raises WorkerLost."""

    async def open(self) -> None:
        """Start the worker's process or actor."""

    async def send(self, message: Message) -> None:
        """Send a message; messages arrive in order."""

    async def receive(self) -> list[Message]:
        """Return the next messages, at least one."""

    async def kill(self) -> str:
        """End the worker at once. Returns what it wrote last, for people."""
