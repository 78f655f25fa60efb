"""The contract between a training run, its learner, and the computation behind the learner.

A run's loop calls a `PolicyLearner` once a step; `update.Learner` is the one of this package. A `Learner` leaves every
forward, backward and optimizer step to a `ModelCompute`; `compute.Compute` is the one of a single process. Plugins
bring others: a learner through the offer "learners", processes that compute together through "teams". Each protocol
lists everything that its caller uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentrl_cli.types import Episode, TrainSignals

if TYPE_CHECKING:
    from agentrl_cli.errors import RunFailed
    from agentrl_cli.learning.compute import MicroBatch, StepResult, StepSpec, TokenScores
    from agentrl_cli.learning.distill import Teacher
    from agentrl_cli.learning.packing import Segment
    from agentrl_cli.learning.value import Critic


@dataclass
class Update:
    """The result of a step: metrics under TRL's names where it has one, and signals by episode id."""

    metrics: dict[str, float] = field(default_factory=dict)
    signals: dict[str, TrainSignals] = field(default_factory=dict)
    advantages: dict[str, float] = field(default_factory=dict)


class ModelCompute(Protocol):
    """A model, its optimizer and its value head, on one process or many."""

    optimizer: Any

    @property
    def critic(self) -> Critic | None:
        """The value head; None if the estimator needs none."""

    def fault(self) -> RunFailed | None:
        """Return why the computation cannot continue; None if all is well. Any thread may ask at any time."""

    def teach(self, teacher: Teacher) -> None:
        """Let the loss, and a forward under it, use a teacher. Raises ConfigError if that cannot be."""

    def split(self, segments: Sequence[Sequence[Segment]]) -> list[list[tuple[int, int]]]:
        """Return the micro-batches of these sequences, each as (bundle, number within it)."""

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is not the model's weights."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; the model's weights are loaded before."""

    def begin(self, lr: float) -> None:
        """Prepare for optimizer steps at this learning rate."""

    def end(self) -> None:
        """Return to sampling: the update is done."""

    def forward(
        self,
        batches: Sequence[MicroBatch],
        *,
        under: str = "model",
        values: bool = False,
        entropy: bool = False,
    ) -> list[TokenScores]:
        """Score each micro-batch under the model, its reference or its teacher; values and entropy on request."""

    def step(self, batches: Sequence[MicroBatch], spec: StepSpec) -> StepResult:
        """Take one optimizer step over a mini-batch."""


class PolicyLearner(Protocol):
    """Updates the weights of a run."""

    @property
    def compute(self) -> ModelCompute:
        """Answers for faults and for the comparison with servers that sample."""

    @property
    def needs(self) -> str:
        """Required inputs of the estimator besides rewards: values, baseline, teacher, or "" for none."""

    def update(
        self,
        groups: Sequence[Sequence[Episode]],
        step: int,
        baselines: Mapping[str, float] | None = None,
    ) -> Update:
        """Train on groups of episodes, all of which count; no group, no change.

        `baselines`: reward of the greedy attempt by group id, for an estimator that needs it. Raises TrainingStopped
        if the loss is NaN.
        """

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is not the model's weights."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; the model's weights are loaded before."""

    def close(self) -> None:
        """Free everything, at the end of a run."""
