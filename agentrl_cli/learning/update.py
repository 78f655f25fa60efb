"""One training step, one way: a table of its tokens, forwards that fill it, advantages, optimizer steps, metrics.

Gradients of micro-batches add up to that of the whole mini-batch, because every normaliser is the mini-batch's own
total. With one epoch and one mini-batch the log-probabilities before the first optimizer step are those of the only
forward, so no second one is made, unless advantages depend on it (values, KL in the reward).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from agentrl_cli.config import Config
from agentrl_cli.config.records import LearnerSettings, Settings
from agentrl_cli.errors import ConfigError, TrainingStopped
from agentrl_cli.learning import advantages
from agentrl_cli.learning.coefficients import Coefficients
from agentrl_cli.learning.compute import Compute, MicroBatch, StepSpec
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.estimator_inputs import AdvantageInput, Float64
from agentrl_cli.learning.losses import find, select_tokens
from agentrl_cli.learning.objective import KL, loss_config
from agentrl_cli.learning.optimizers import learning_rate
from agentrl_cli.learning.packing import select_segments
from agentrl_cli.learning.protocols import ModelCompute, Update
from agentrl_cli.learning.scoring import (
    mask_certain,
    reject_far,
    score_current,
    score_policy,
    score_reference,
    score_sampled,
    score_teacher,
)
from agentrl_cli.learning.step_table import StepTable, TokenColumns, sampling_gap
from agentrl_cli.learning.turn_advantages import value_targets
from agentrl_cli.learning.value import explained_variance
from agentrl_cli.models.adapter import has_dropout
from agentrl_cli.types import Episode, Float32
from agentrl_cli.types.tokens import COLDEST


class Learner:
    """A model, its optimizer and the configured algorithm.

    Args:
        model: A causal LM, peft-wrapped or not; what requires a gradient is trained.
        reference: The model that the KL term compares with; None if there is no KL term, or if `model` is a peft
            model, which without its adapter is the reference.
        checkpoint: Recompute activations in the backward pass.
        teacher: Scores the sampled tokens, for an estimator that needs one.
        aside: Between updates the optimizer's state waits in the CPU's memory (one of plan.MOVES).
        compute: What computes with the model, if not this process alone; then the arguments before do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings | Config,
        reference: nn.Module | None = None,
        *,
        checkpoint: bool = False,
        aside: bool = False,
        compute: ModelCompute | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        config = LearnerSettings.of(settings)
        algo = config.algo
        if config.rollout.temperature < COLDEST:
            raise ConfigError(
                f"Training needs a rollout.temperature of {COLDEST:g} or more: greedy attempts are all the same.",
                hint="agentrl train --set rollout.temperature=1",
            )
        self.config = config
        self.estimator = advantages.function(algo.advantage.name)
        self.needs = advantages.needs(algo)
        self.teacher = teacher
        if self.needs == "teacher" and teacher is None:
            raise ConfigError(f"algo.advantage {algo.advantage.name!r} needs a teacher.")
        self.selects, self.has_dropout = bool(find(algo.loss.name).select), has_dropout(model)
        self.loss_config = loss_config(config)
        self.coefficients = Coefficients.of(algo)
        self.means: dict[str, float] = {}
        """Running means of rewards, for an estimator that moves them."""
        self.compute: ModelCompute = compute or Compute(
            model, config, reference, checkpoint=checkpoint, aside=aside
        )
        if teacher is not None:
            self.compute.teach(teacher)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without the model's weights."""
        own = {"coefficients": self.coefficients.state(), "means": dict(self.means)}
        return {**self.compute.state(), **own}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.compute.load_state(state)
        if "coefficients" in state:
            self.coefficients.load(state["coefficients"])
        self.means = dict(state.get("means", {}))

    def close(self) -> None:
        """Close open resources; called at the end of a run."""

    def learning_rate(self, step: int) -> float:
        """Return the policy's learning rate in a step."""
        return learning_rate(self.config.train, step)

    def update(
        self,
        groups: Sequence[Sequence[Episode]],
        step: int,
        baselines: Mapping[str, float] | None = None,
    ) -> Update:
        """Train on groups of episodes, all of which count. Raises TrainingStopped if the loss is NaN.

        `baselines`: reward of the greedy attempt by group id, for an estimator that needs it.
        """
        if not any(groups):
            return Update()
        table, algo = StepTable.of(step, groups), self.config.algo
        seen = table.columns
        parts = [
            [bundle for group in part for bundle in table.groups[group]]
            for part in np.array_split(np.arange(len(table.groups)), algo.minibatches)
        ]
        rejected = self._score(table, [bundle for part in parts[1:] for bundle in part])
        self._estimate(table, baselines)
        lr = self.learning_rate(step)
        self.compute.begin(lr)
        sums: dict[str, list[float]] = {}
        for epoch in range(algo.epochs):
            for number, bundles in enumerate(parts):
                seed = hash((step, epoch, number)) % 2**31
                for name, value in self._train(table, bundles, lr, seed).items():
                    sums.setdefault(name, []).append(value)
        self.compute.end()
        result = Update(rejected | {name: float(np.mean(values)) for name, values in sums.items()})
        result.metrics |= {"learning_rate": lr} | self.coefficients.metrics()
        result.metrics |= _compare(seen, sampler=not algo.off_policy.bypass)
        self.coefficients.adapt(result.metrics, len(seen.advantage))
        result.signals = {episode.id: signals for episode, signals in table.signals()}
        by_episode = advantages.episode_advantage(table.by_episode(seen.advantage))
        for episode, advantage in zip(table.episodes, by_episode, strict=True):
            result.advantages[episode.id] = float(advantage)
        return result

    def _score(self, table: StepTable, later: Sequence[int]) -> dict[str, float]:
        """Fill in what other forwards say of the tokens. Returns the shares that `off_policy.reject` leaves out.

        `later`: the bundles of all mini-batches but the first. That one needs no scoring: its own forward still sees
        the weights before the update, if it draws no dropout.
        """
        algo, bootstrap = self.config.algo, self.config.algo.value_head.value_bootstrap
        unknown = any(episode.tokens.support is None for episode in table.episodes)
        if self.config.rollout.truncation.replay and unknown:
            raise ConfigError(
                "rollout.truncation.replay is set, and an episode has no record of the tokens that could be drawn.",
                hint="Episodes from a server or an older run have none: leave the setting out.",
            )
        far = algo.off_policy
        early = self.needs in ("values", "teacher") or self.coefficients.in_reward
        early = early or (bool(later) and self.selects)
        early = early or (self.has_dropout and (bool(later) or algo.epochs > 1))
        if (early and not far.bypass) or far.reject != "none":
            score_policy(table, self.compute, bootstrap=bootstrap)
        elif later and not far.bypass:
            score_policy(table, self.compute, bootstrap=bootstrap, bundles=later)
        if far.bypass:
            score_sampled(table, self.compute, bootstrap=bootstrap)
        if algo.kl.coef:
            score_reference(table, self.compute)
        if self.teacher is not None:
            score_teacher(table, self.compute, self.teacher)
        return reject_far(table, algo) if algo.off_policy.reject != "none" else {}

    def _estimate(self, table: StepTable, baselines: Mapping[str, float] | None) -> None:
        """Fill in every token's advantage, and with a value head its return."""
        seen = table.columns
        options = advantages.options(self.config.algo)
        x = AdvantageInput.of(table.episodes, means=self.means, **options)

        def per_episode(column: Float32 | Float64 | None) -> tuple[Float64, ...]:
            assert column is not None
            return tuple(table.by_episode(column.astype(np.float64)))

        if baselines is not None and self.needs == "baseline":
            greedy = np.array([baselines[e.group_id or ""] for e in table.episodes])
            x = replace(x, baseline=greedy)
        if seen.accepted is not None:
            x = replace(x, accepted=tuple(table.by_episode(seen.accepted)))
        if self.compute.critic is not None:
            x = replace(x, values=per_episode(seen.value), bootstrap=table.bootstrap)
        if self.coefficients.in_reward:
            assert seen.old_logp is not None and seen.ref_logp is not None
            old, ref = torch.from_numpy(seen.old_logp), torch.from_numpy(seen.ref_logp)
            penalty = self.coefficients.kl * KL[self.config.algo.kl.estimate](old, ref).numpy()
            x = replace(x, token_penalty=per_episode(penalty))
        if self.teacher is not None:
            teacher, student = per_episode(seen.teacher_logp), per_episode(seen.old_logp)
            # Where the loss compares distributions, it has the teacher's term.
            coef = 0.0 if self.teacher.wants_states else x.coef
            x = replace(x, logp_teacher=teacher, logp_student=student, coef=coef)
        seen.advantage = np.concatenate(self.estimator(x))
        if self.teacher is not None:
            seen.reward_advantage = np.concatenate(advantages.grpo(x))
        if self.compute.critic is not None:
            seen.returns = np.concatenate(value_targets(x))

    def _train(
        self, table: StepTable, bundles: Sequence[int], lr: float, seed: int
    ) -> dict[str, float]:
        """One optimizer step over some bundles; metrics add up over its micro-batches."""
        seen, segments = table.columns, table.segments(bundles)
        totals = table.totals(bundles, self.config.rollout.max_tokens)
        if not totals.tokens:
            return {}
        if self.selects or self.config.algo.entropy.share < 1:
            self._select(table, bundles, seed)
        batches, rows = [], []
        sizes = table.episode_sizes()
        for row in self.compute.split(segments):
            sequences = [table.bundles[bundles[b]][m] for b, m in row]
            rows.append(table.rows(sequences))
            numbers = [table.sequences[s].episode_number for s in sequences]
            batches.append(
                MicroBatch(
                    select_segments(segments, row),
                    seen.loss_inputs(rows[-1]),
                    None if sizes is None else [sizes[n] for n in numbers],
                )
            )
        loss, train = self.coefficients.apply(self.loss_config), self.config.train
        spec = StepSpec(loss, totals, lr / train.lr, train.max_grad_norm)
        done = self.compute.step(batches, spec)
        table.record(rows, done.tokens)
        if done.applied:
            return {**done.metrics, "grad_norm": done.norm}
        if "nan" in train.stop_on.alerts and not train.heal:
            raise TrainingStopped(
                f"nan: the gradient norm is {done.norm}; the weights were left as they were.",
                hint="Lower train.lr or train.max_grad_norm; look at the last episodes with `agentrl replay last`.",
            )
        return {"loss": done.metrics.get("loss", math.nan), "grad_norm": done.norm}

    def _select(self, table: StepTable, bundles: Sequence[int], seed: int) -> None:
        """Let the loss and the entropy mask select tokens over the whole mini-batch."""
        algo, seen = self.config.algo, table.columns
        score_current(table, self.compute, bundles)
        rows = table.rows(s for b in bundles for s in table.bundles[b])
        if algo.entropy.share < 1:
            mask_certain(table, rows, algo.entropy.share)
        if not self.selects:
            return
        assert seen.current_logp is not None
        logp, old, advantage = (
            torch.from_numpy(column[rows])
            for column in (
                seen.current_logp,
                seen.current_logp if seen.old_logp is None else seen.old_logp,
                seen.advantage,
            )
        )
        selected = select_tokens(algo.loss, logp, advantage, seed, old)
        assert selected is not None
        seen.selected = table.scatter(seen.selected, rows, selected.numpy())


def _compare(seen: TokenColumns, *, sampler: bool) -> dict[str, float]:
    """Return how far values lie from returns, and log-probabilities before the update from others of the same tokens.

    `value/explained_variance` is of the values before the update, not for equal returns; `distill/kl` the mean of
    log p − log p of the teacher over the sampled tokens; `sampler`: those of `sampling_gap` too.
    """
    found: dict[str, float] = {}
    if seen.value is not None and seen.returns is not None:
        both = (torch.from_numpy(one).double() for one in (seen.value, seen.returns))
        share = explained_variance(*both)
        found |= {} if math.isnan(share) else {"value/explained_variance": share}
    if seen.old_logp is None:
        return found
    if seen.teacher_logp is not None:
        found["distill/kl"] = float((seen.old_logp - seen.teacher_logp).mean())
    return found | (sampling_gap(seen.old_logp, seen.sampler_logp) if sampler else {})
