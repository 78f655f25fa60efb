"""The sections of what trains and evaluates: trainer, train, eval."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from agentrl_cli.types.section import Count, Group, OnOff, Positive, Repeats, Section, Unit

Stop = Literal[
    "mask",
    "drift",
    "bad_tokens",
    "mismatch",
    "too_long",
    "stop",
    "parser",
    "malformed",
    "truncated",
    "errors",
    "tools",
    "arguments",
    "ungraded",
    "grader_noise",
    "grader",
    "reward_hacking",
    "all_solved",
    "same_attempts",
    "all_failed",
    "no_signal",
    "nan",
    "no_gradient",
    "gradients",
    "no_movement",
    "collapse",
    "entropy_collapse",
    "kl_drift",
    "clip_drift",
    "leak",
    "few_rows",
    "memorised",
    "off_reference",
]
"""Names of rules (reports/diagnosis.py)."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Group):
    """The optimizer."""

    name: Literal["adamw", "adamw8bit", "adamw_offload", "muon"] = Field(
        default="adamw",
        description="adamw, adamw8bit (8-bit state; GPU, extra quant), adamw_offload (state in CPU memory), muon",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's betas")


class ScheduleConfig(Group):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after warm-up"
    )
    warmup_steps: Count = Field(default=5, description="steps of linear warm-up")


class TrainEvalConfig(Group):
    """Evaluations during training."""

    every: Count = Field(default=0, description="evaluate every N steps; 0: never")
    split: str = Field(
        default="validation",
        description="the split for evaluations during training, which choose the best checkpoint; if absent and"
        " every is set, a tenth of the training tasks is held out",
    )
    tasks: Positive = Field(default=40, description="tasks of an evaluation during training")
    samples: Repeats = Field(default=2, description="attempts at each of these tasks")


class SaveConfig(Group):
    """Checkpoints."""

    every: Positive = Field(
        default=20, description="checkpoint every N steps; the last step always saves"
    )
    keep: Positive = Field(default=3, description="checkpoints kept besides the best")


class StopConfig(Group):
    """Alerts that stop the run."""

    alerts: list[Stop] = Field(
        default=["nan"], description="alerts that stop the run: " + ", ".join(get_args(Stop))
    )
    patience: Positive = Field(
        default=1, description="consecutive steps with such an alert before it stops the run"
    )


class TrainConfig(Section):
    """The optimizer, the schedule, evaluation and checkpoints."""

    steps: Positive = Field(default=60, description="training steps")
    lr: float = Field(default=1e-4, gt=0, description="peak learning rate")
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig,
        description="learning rate after warm-up: constant, linear, cosine; with options: {name: cosine,"
        " warmup_steps: 9}",
    )
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig,
        description="adamw, adamw8bit (8-bit state; GPU, extra quant), adamw_offload (state in CPU memory), muon; with"
        " options: {name: adamw, weight_decay: 0.01}",
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="gradients are scaled down to this norm"
    )
    token_budget: Positive = Field(
        default=4096, description="tokens of a micro-batch, padding included"
    )
    checkpointing: Annotated[Literal["auto", "on", "off"], OnOff] = Field(
        default="auto",
        description="recompute activations in the backward pass: a third slower, a fraction of the memory; auto: if"
        " they would not fit by the memory plan",
    )
    eval: TrainEvalConfig = Field(
        default_factory=TrainEvalConfig,
        description="evaluate every N steps, 0: never; with options: {every: 10, split: validation, tasks: 40}",
    )
    heal: bool = Field(
        default=False,
        description="after steps that were too large (nan, collapse, or a drift while less is solved) load the best"
        " checkpoint and lower lr, three times at most; a checkpoint is saved every 5 steps",
    )
    save: SaveConfig = Field(
        default_factory=SaveConfig,
        description="checkpoint every N steps, and after the last; with options: {every: 20, keep: 3}",
    )
    stop_on: StopConfig = Field(
        default_factory=StopConfig,
        description="alerts that stop the run: "
        + ", ".join(get_args(Stop))
        + "; with options: {alerts: [nan], patience: 2}",
    )


class EvalConfig(Section):
    """`agentrl eval`."""

    split: str = Field(default="test", description="the split that is evaluated")
    k: Repeats = Field(default=4, description="attempts at each task: pass@1 to pass@k")
    limit: Positive | None = Field(default=150, description="tasks; null: all of the split")
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    fail_under: Unit | None = Field(default=None, description="exit 4 if pass@1 is lower")
