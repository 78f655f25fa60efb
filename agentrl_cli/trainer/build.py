"""Makes the parts of a training: tasks, learner, rollout, sampler, checkpoints, controls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.config import Config
from agentrl_cli.hooks import HookList
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.policies.load import Loaded
from agentrl_cli.policies.protocols import require_trainable
from agentrl_cli.rollout.context import Workers
from agentrl_cli.rollout.greedy import Greedy
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import Pack
from agentrl_cli.trainer.checkpoints import Checkpoints
from agentrl_cli.trainer.compute import make_compute
from agentrl_cli.trainer.controls import Controls
from agentrl_cli.trainer.loop import Trainer
from agentrl_cli.trainer.prefetch import Prefetcher
from agentrl_cli.trainer.report import Reporter
from agentrl_cli.trainer.sampler import Collector, find_tasks
from agentrl_cli.trainer.teacher import find_teacher
from agentrl_cli.trainer.validation import validation
from agentrl_cli.trainer.with_trl import make_learner

if TYPE_CHECKING:
    from agentrl_cli.sandbox import Sandbox
    from agentrl_cli.trainer.ranks import Team


def build_trainer(
    config: Config,
    run: RunRow,
    loaded: Loaded,
    packs: dict[str, Pack],
    store: Store,
    *,
    sandbox: Sandbox | None = None,
    hooks: HookList | None = None,
    workers: Workers | None = None,
    team: Team | None = None,
    narrate: Callable[[str], None] = lambda text: None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    base: Path | None = None,
    accept_changes: bool = False,
) -> Trainer:
    """Return a training of `run`, whose row is in the store.

    `loaded` is loaded `trainable`. Without `workers` this process makes the episodes, without `team` it trains alone.
    `base` is the project folder; None: the current one. `accept_changes`: see Trainer.

    Raises ModelError if the policy cannot be trained with, ConfigError without tasks.
    """
    run = store.runs.add_folder(run)
    policy, hooks, base = require_trainable(loaded.policy), hooks or HookList(), base or Path.cwd()
    split = validation(config, packs, find_tasks(config, packs, store), store, run, narrate)
    torch.manual_seed(config.seed)
    teacher = find_teacher(config, loaded, split.train, store, base)
    reporter = Reporter(config, store, run, narrate)
    make = partial(make_learner, config, loaded, Path(run.dir), partial(reporter.log, "warn"))
    learner = make(compute=make_compute(config, loaded, team), teacher=teacher, hooks=hooks)
    if (
        hooks.has("on_sample") and config.algo.correction == "auto"
    ):  # a hook samples from another distribution
        learner.loss_config = replace(learner.loss_config, correction="tis")
    shaped = HookList([*hooks.hooks, Shaping(config)])
    sampled = AgentRollout(
        policy, loaded.chat, packs, config, sandbox=sandbox, store=store, hooks=shaped, run=run
    )
    rollout = sampled.with_(workers=workers)
    vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
    collector = Collector(config, run, split.train, store, rollout, vocabulary, narrate)
    prefetcher = Prefetcher(collector.sample, config)
    if prefetcher.staleness:
        rollout.slots = asyncio.Semaphore(rollout.context.concurrency)
    greedy = Greedy(config, run, store, rollout) if learner.needs == "baseline" else None
    checkpoints = Checkpoints(config, store, run, loaded, learner, narrate)
    controls = Controls(config, run.id, store, narrate, learner.compute.fault)
    sampling, keeping = (rollout, collector, prefetcher, greedy), (reporter, checkpoints, controls)
    opened = (config, run, loaded, policy, packs, store, hooks)
    return Trainer(
        *opened,
        learner,
        *sampling,
        *keeping,
        split.train,
        split.tasks,
        narrate,
        base,
        on_step,
        accept_changes,
    )
