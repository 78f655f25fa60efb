"""The store's rows as frozen dataclasses, for lists and screens, without tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl_cli.store.holder import Holder
from agentrl_cli.types import Outcome, RewardPart

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunRow:
    """One training, rollout, evaluation or chat. `step` counts finished steps."""

    id: str
    name: str
    kind: str = "train"
    """train | rollout | eval | chat | whatif"""
    status: str = "running"
    """running | finished | stopped | failed. A run killed from outside stays `running`: see `alive`."""
    model: str = ""
    pack: str = ""
    seed: int = 0
    step: int = 0
    total_steps: int = 0
    tokenizer: str = ""
    """Hash of the tokenizer that its episodes are decoded with."""
    parent_id: str | None = None
    parent_step: int | None = None
    dir: str = ""
    """Its folder, absolute; stored relative to the store. Empty if it has none."""
    claim: str = ""
    """The command whose process holds the run now: train, rollout, eval, sft, merge; empty if absent."""
    pid: int = 0
    """The process that held it last; the next three fields make it unique (see holder.py)."""
    pid_started: str = ""
    boot: str = ""
    host: str = ""
    version: str = ""
    """The agentrl version that wrote it."""
    error: str = ""
    started: float = 0.0
    ended: float = 0.0
    heartbeat: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holder(self) -> Holder:
        """The process that holds the run, or held it last."""
        return Holder(self.pid, self.pid_started, self.boot, self.host)

    @property
    def held(self) -> bool:
        """True while a live process holds it, for any command."""
        return bool(self.claim) and self.holder.lives(self.heartbeat)

    @property
    def alive(self) -> bool:
        """True while the run continues: its status is running and its process is alive."""
        return self.status == "running" and self.claim == self.kind and self.held

    @property
    def state(self) -> str:
        """`status`, or `interrupted` if the process died while running."""
        return self.status if self.status != "running" or self.alive else "interrupted"


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One row of an episode list."""

    rowid: int
    id: str
    run_id: str | None
    group_id: str | None
    task_id: str
    pack: str
    family: str
    split: str
    step: int | None
    sample: int
    seed: int
    kind: str
    parent_id: str | None
    parent_turn: int | None
    weights_version: str
    tokenizer: str
    outcome: Outcome | None
    error: str
    reward: float | None
    """None while it runs, and if not graded."""
    primary_score: float | None
    advantage: float | None
    fact: str
    n_turns: int
    n_tokens: int
    n_model_tokens: int
    n_calls: int
    n_tool_errors: int
    level: str
    flags: tuple[str, ...]
    started: float
    ended: float
    key: str | None
    """`run/step/group/sample`: the same attempt after a resume has the same key."""
    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def running(self) -> bool:
        return self.outcome is None

    @property
    def seconds(self) -> float | None:
        return self.ended - self.started if self.ended else None


def episode_state(row: EpisodeRow, run: RunRow | None) -> str:
    """Return the outcome; without one `running`, or `interrupted` if its run's process died."""
    if row.outcome is not None:
        return str(row.outcome)
    return "running" if run is None or run.alive else "interrupted"


def part_note(part: RewardPart) -> str:
    """Return remarks on a reward part: its detail, and whether the solution could have forged it."""
    return " · ".join(
        filter(None, ["FAKEABLE: tests ran beside the solution" * part.fakeable, part.detail])
    )


@dataclass(frozen=True, slots=True)
class LiveRow:
    """An episode that runs now."""

    episode_id: str
    run_id: str | None
    task_id: str
    sample: int
    state: str
    """An `AgentState` value."""
    turn: int
    text: str
    """Tail of the generated text."""
    started: float
    updated: float
    kind: str = "train"
    """Kind of the episode: a training's evaluations are live in the same run."""


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One evaluation: `pass_rate` is pass@1 over `n_tasks` tasks with `n_samples` each, `low..high` its interval."""

    run_id: str | None
    step: int | None
    name: str = ""
    """The evaluated weights: `base`, `step-20`, `best`…"""
    split: str = "test"
    n_tasks: int = 0
    n_samples: int = 0
    pass_rate: float | None = None
    low: float | None = None
    high: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """All other numbers: pass@k, per family, reward, tool-call rate."""
    at: float = 0.0
    id: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint folder; `kind` is step | best | last."""

    run_id: str
    step: int
    kind: str
    path: str
    """Absolute; stored relative to the store."""
    metrics: Mapping[str, Any]
    at: float
    id: int


@dataclass(frozen=True, slots=True)
class ControlRow:
    """A person's request to a running training: pause, resume, checkpoint, evaluate, set, stop."""

    id: int
    run_id: str
    at: float
    action: str
    data: Mapping[str, Any]
    taken: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker of a run, as it was when last seen."""

    run_id: str
    number: int
    kind: str
    node: str
    pid: int
    state: str
    """ready | starting | closed"""
    version: str
    running: int
    finished: int
    tokens: int
    rate: float
    """Sampled tokens a second, lately."""
    lost: int
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class TokenizerRow:
    """A tokenizer, to decode episodes without the model."""

    hash: str
    tokenizer_json: str
    chat_template: str
    specials: Mapping[str, Any]


def columns(row: type[Any]) -> tuple[str, ...]:
    """Return the column names of a row class, in the order of its fields."""
    return tuple(row.__slots__)


def build(row: type[T], values: Sequence[Any], **decoded: Any) -> T:
    """Return a row from the values of its first columns, in order; `decoded` replaces some and adds others."""
    return row(**{**dict(zip(columns(row), values, strict=False)), **decoded})
