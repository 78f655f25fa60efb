"""Makes the parts of a training: tasks, learner, rollout, sampler, checkpoints, controls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl_cli.config import Config
from agentrl_cli.config.records import MemorySettings, TrainerSettings
from agentrl_cli.hooks import HookList
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.learning.protocols import PolicyLearner
from agentrl_cli.learning.update import Learner
from agentrl_cli.policies.load import Loaded
from agentrl_cli.policies.protocols import require_trainable
from agentrl_cli.rollout.greedy import Greedy
from agentrl_cli.rollout.parts import name_agents
from agentrl_cli.store import RunRow
from agentrl_cli.store.new_run import keep_settings
from agentrl_cli.trainer.checkpoints import Checkpoints
from agentrl_cli.trainer.compute import LearnerMaker, Team, make_compute
from agentrl_cli.trainer.controls import Controls
from agentrl_cli.trainer.heal import Healer
from agentrl_cli.trainer.loop import Trainer
from agentrl_cli.trainer.prefetch import Prefetcher
from agentrl_cli.trainer.report import Reporter
from agentrl_cli.trainer.sampler import Collector, find_tasks
from agentrl_cli.trainer.teacher import find_teacher
from agentrl_cli.trainer.validation import validation

if TYPE_CHECKING:
    from agentrl_cli.rollout import Rollout


def build_trainer(
    config: Config,
    run: RunRow,
    loaded: Loaded,
    rollout: Rollout,
    *,
    team: Team | None = None,
    maker: LearnerMaker | None = None,
    narrate: Callable[[str], None] = lambda text: None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    base: Path | None = None,
    accept_changes: bool = False,
) -> Trainer:
    """Return a training of `run`, whose row is in the rollout's store, with a model that is loaded `trainable`.

    Without a `team` this process computes alone; `maker` makes a plugin's learner; `base` is the project folder, or
    None for the current one. Raises ModelError if the policy cannot be trained with, ConfigError without tasks.
    """
    policy, opened, base = require_trainable(loaded.policy), rollout.context, base or Path.cwd()
    store, packs, hooks = opened.store, dict(opened.packs), opened.hooks
    assert store is not None
    run, settings = store.runs.add_folder(run), TrainerSettings.of(config)
    found = find_tasks(config.task, packs, store)
    tasks, held = validation(settings, packs, found, store, run, narrate)
    torch.manual_seed(config.seed)
    reporter = Reporter(settings, store, run, narrate, [*tasks, *held])
    if maker is not None:
        learner = maker(loaded, Path(run.dir), hooks, partial(reporter.log, "warn"))
    else:
        teacher = find_teacher(settings, loaded, tasks, store, base)
        learner = _make_learner(config, loaded, hooks, team, teacher)
    shaping = Shaping(config.algo, config.rollout, policy.context_length, name_agents(packs))
    rollout = rollout.with_(run=run, hooks=HookList([*hooks.hooks, shaping]))
    if config.rollout.async_staleness:
        rollout.slots = asyncio.Semaphore(rollout.context.concurrency)
    vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
    collector = Collector(settings, run, tasks, store, rollout, vocabulary, narrate)
    parts = (settings, run, loaded, policy, packs, store, hooks, learner, rollout, collector)
    keep = partial(keep_settings, run, config, store)
    checkpoints = Checkpoints(config.train, store, run, loaded, learner, narrate)
    return Trainer(
        *parts,
        Prefetcher(collector.sample, settings),
        Greedy(config.seed, run, store, rollout) if learner.needs == "baseline" else None,
        reporter,
        checkpoints,
        Controls(config.train, run.id, store, narrate, learner.compute.fault, keep),
        Healer(config.train, run, store, checkpoints, keep),
        *(held, narrate, base, on_step, accept_changes),
    )


def _make_learner(
    config: Config, loaded: Loaded, hooks: HookList, team: Team | None, teacher: Teacher | None
) -> PolicyLearner:
    """Return this package's learner, which corrects for a hook that samples from another distribution."""
    compute = (
        make_compute(MemorySettings.of(config), loaded)
        if team is None
        else team.compute(config, loaded)
    )
    if hooks.has("on_sample") and config.algo.off_policy.correction == "auto":
        config = config.replace(algo={"off_policy": {"correction": "tis"}})
    return Learner(loaded.model, config, compute=compute, teacher=teacher)
