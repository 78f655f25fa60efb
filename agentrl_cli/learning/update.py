"""One training step: advantages, packed forwards, the objective, the optimizer, and a record of every token.

Gradients of micro-batches add up to that of the whole mini-batch, because every normaliser is the mini-batch's own
total. With one epoch and one mini-batch the log-probabilities before the first optimizer step are those of the only
forward, so no second one is made, unless advantages depend on it (values, KL in the reward).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, TrainingStopped
from agentrl_cli.learning import advantages
from agentrl_cli.learning.coefficients import Coefficients
from agentrl_cli.learning.compute import Columns, Compute, MicroBatch, Order
from agentrl_cli.learning.dispositions import CUT
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.estimator_inputs import AdvantageInput
from agentrl_cli.learning.kl import KL
from agentrl_cli.learning.losses import find, mark
from agentrl_cli.learning.masks import hold_certain, reject
from agentrl_cli.learning.optimizers import learning_rate
from agentrl_cli.learning.packing import Segment, chosen
from agentrl_cli.learning.protocols import ModelCompute, Update
from agentrl_cli.learning.settings import loss_config
from agentrl_cli.learning.step import Source, Step
from agentrl_cli.learning.token_record import Member, TokenRecord, gap, signals
from agentrl_cli.learning.turn_advantages import value_targets
from agentrl_cli.learning.value import Critic, explained_variance
from agentrl_cli.types import Episode, no_support


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
        config: Config,
        reference: nn.Module | None = None,
        *,
        checkpoint: bool = False,
        aside: bool = False,
        compute: ModelCompute | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        algo = config.algo
        if config.rollout.temperature <= 0:
            raise ConfigError(
                "Training needs rollout.temperature above 0: greedy attempts are all the same."
            )
        self.config = config
        self.estimator = advantages.function(algo.advantage.name)
        self.needs = advantages.needs(algo)
        self.teacher = teacher
        if self.needs == "teacher" and teacher is None:
            raise ConfigError(f"algo.advantage {algo.advantage.name!r} needs a teacher.")
        self.marks = bool(find(algo.loss.name).mark)
        self.loss_config = loss_config(config)
        self.coefficients = Coefficients.of(algo)
        self.compute: ModelCompute = compute or Compute(
            model, config, reference, checkpoint=checkpoint, aside=aside
        )
        self.teacher_forward = None if teacher is None else self.compute.teach(teacher)

    @property
    def optimizer(self) -> Any:
        """The optimizer of the policy's weights."""
        return self.compute.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.compute.optimizer = optimizer

    @property
    def critic(self) -> Critic | None:
        """The value head; None if the estimator needs none."""
        return self.compute.critic

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the model's weights."""
        return {**self.compute.state(), "coefficients": self.coefficients.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.compute.load_state(state)
        if "coefficients" in state:
            self.coefficients.load(state["coefficients"])

    def close(self) -> None:
        """Called at the end of a run."""

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
        result = Update()
        if not any(groups):
            return result
        now, algo = Step.of(step, groups), self.config.algo
        if self.config.rollout.replay_truncation:
            _require_support(now.episodes)
        in_reward = bool(algo.kl_coef) and algo.kl_in == "reward"
        early = (
            algo.epochs * algo.minibatches > 1 or self.needs in ("values", "teacher") or in_reward
        )
        if (early and not algo.bypass) or algo.reject != "none":
            self._before(now, "old")
        if algo.reject != "none":
            result.metrics |= reject(now, algo)
        if algo.bypass:
            self._as_sampled(now)
        if algo.kl_coef:
            self._before(now, "ref")
        if self.teacher is not None:
            self._taught(now, self.teacher)
        self._advantages(now, baselines, in_reward)
        lr = self.learning_rate(step)
        self.compute.begin(lr)
        sums: dict[str, list[float]] = {}
        for epoch in range(algo.epochs):
            for number, batch in enumerate(_minibatches(len(groups), algo.minibatches)):
                for name, value in self._minibatch(
                    now, now.batch(batch), lr, (epoch, number)
                ).items():
                    sums.setdefault(name, []).append(value)
        self.compute.end()
        result.metrics |= {name: float(np.mean(values)) for name, values in sums.items()} | {
            "learning_rate": lr
        }
        result.metrics |= self.coefficients.metrics() | _explained(list(now.seen.values()))
        result.metrics |= _distance(now.seen.values())
        if not algo.bypass:
            result.metrics |= gap((one.old, now.sampler(m)) for m, one in now.seen.items())
        self.coefficients.adapt(
            result.metrics, sum(episode.trained_tokens for episode in now.episodes)
        )
        for episode, seen in now.records():
            result.signals[episode.id] = signals(episode, seen)
            result.advantages[episode.id] = (
                float(seen.advantage.mean()) if len(seen.advantage) else 0.0
            )
        return result

    def _advantages(
        self, now: Step, baselines: Mapping[str, float] | None, in_reward: bool
    ) -> None:
        """Fill in every token's advantage, and with a value head its return."""
        episodes = now.episodes
        fields = advantages.options(self.config.algo)
        if baselines is not None and self.needs == "baseline":
            fields["baseline"] = np.array(
                [baselines[e.group_id or ""] for e in episodes], np.float64
            )
        if self.critic is not None:
            fields["values"] = tuple(
                np.asarray(values, np.float64) for values in now.joined("value")
            )
            fields["bootstrap"] = np.array(now.after(), np.float64)
        if in_reward:
            fields["token_penalty"] = tuple(
                _penalties(now, self.config.algo.kl, self.coefficients.kl)
            )
        if self.teacher is not None:
            for name, column in (("logp_teacher", "teacher"), ("logp_student", "old")):
                fields[name] = tuple(
                    np.asarray(values, np.float64) for values in now.joined(column)
                )
            if self.teacher.wants_states:
                fields["coef"] = 0.0  # the loss has the teacher's term
        x = AdvantageInput.of(episodes, **fields)
        now.give("advantage", self.estimator(x))
        if self.teacher is not None:
            now.give("reward_advantage", advantages.grpo(x))
        if self.critic is not None:
            now.give("returns", value_targets(x))

    # --- a mini-batch ------------------------------------------------------------------------------------------------

    def _minibatch(
        self, now: Step, batch: Sequence[int], lr: float, place: tuple[int, int]
    ) -> dict[str, float]:
        """One optimizer step over some bundles; metrics add up over its micro-batches."""
        picked = [now.segments[b] for b in batch]
        totals = now.totals(batch, self.config.rollout.max_tokens)
        if self.marks or self.config.algo.entropy_share < 1:
            self._choose(now, batch, seed=hash((now.number, *place)) % 2**31)
        if not totals.tokens:
            return {}
        rows = [[(batch[b], m) for b, m in row] for row in self.compute.split(picked)]
        order = Order(self.coefficients.apply(self.loss_config), totals, lr / self.config.train.lr)
        batches = [self._microbatch(now, row) for row in rows]
        done = self.compute.step(batches, order)
        for row, one, columns in zip(rows, batches, done.columns, strict=True):
            _keep([now.seen[member] for member in row], one, columns)
        if not done.applied:
            if "nan" in self.config.train.stop_on:
                raise TrainingStopped(
                    f"nan: the gradient norm is {done.norm}; the weights were left as they were.",
                    hint="Lower train.lr or train.max_grad_norm; look at the last episodes with `agentrl replay last`.",
                )
            return {"loss": done.metrics.get("loss", math.nan), "grad_norm": done.norm}
        return {**done.metrics, "grad_norm": done.norm}

    def _microbatch(self, now: Step, row: Sequence[Member]) -> MicroBatch:
        """Return a packed row with everything that the loss needs of its tokens."""
        records = [now.seen[member] for member in row]
        names = (
            "advantage",
            "old",
            "ref",
            "marked",
            "kept",
            "held",
            "value",
            "returns",
            "teacher_states",
        )
        known = [name for name in names if getattr(records[0], name) is not None]
        columns = {name: np.concatenate([getattr(one, name) for one in records]) for name in known}
        if self.loss_config.correction != "none":
            columns["sampled"] = np.concatenate(
                [now.sources[member].sampled("logp_sampled") for member in row]
            )
        if self.loss_config.off_policy is not None:
            columns["policy"] = np.concatenate([now.sampler(member) for member in row])
        return MicroBatch(
            chosen(now.segments, row), columns, now.sizes(row) if now.branched else None
        )

    def _choose(self, now: Step, batch: Sequence[int], seed: int) -> None:
        """Let the loss and the entropy mask choose tokens over the whole mini-batch, those that were not rejected."""
        members = now.in_batch(batch)
        self._before(now, "now", batch)
        if self.config.algo.entropy_share < 1:
            hold_certain(now, members, self.config.algo.entropy_share)
        if not self.marks:
            return
        facts = [now.seen[member] for member in members]
        names = ("now", "advantage", "now" if facts[0].old is None else "old")
        logp, advantage, old = (
            torch.from_numpy(np.concatenate([getattr(one, n) for one in facts])) for n in names
        )
        kept = torch.from_numpy(np.concatenate([one.valid for one in facts]))
        found = mark(self.config.algo.loss, logp[kept], advantage[kept], seed, old[kept])
        assert found is not None
        marked = torch.zeros_like(kept).masked_scatter(kept, found)
        ends = np.cumsum([len(one.advantage) for one in facts])[:-1]
        for one, part in zip(facts, np.split(marked.numpy(), ends), strict=True):
            one.marked = part

    # --- other forwards ----------------------------------------------------------------------------------------------

    def _as_sampled(self, now: Step) -> None:
        """Compare with the sampler's log-probabilities; an unknown one is the trainer's."""
        if self.critic is not None or any(
            np.isnan(now.sources[m].sampled("logp_sampled")).any() for m in now.seen
        ):
            self._before(now, "old")
        for member, record in now.seen.items():
            sampled = now.sources[member].sampled("logp_sampled")
            record.old = (
                sampled if record.old is None else np.where(np.isnan(sampled), record.old, sampled)
            )

    def _before(self, now: Step, name: str, batch: Sequence[int] | None = None) -> None:
        """Log-probabilities of trained tokens, without gradient: `ref` the reference's; with `old` come values."""
        bundles = range(len(now.segments)) if batch is None else batch
        segments = [now.segments[b] for b in bundles]
        values, entropy = name == "old" and self.critic is not None, name == "now"
        if values and self.config.algo.value_bootstrap:
            segments = [
                [_beyond(now.sources[b, m], s) for m, s in enumerate(now.segments[b])]
                for b in bundles
            ]
        forward = partial(
            self.compute.forward, reference=name == "ref", values=values, entropy=entropy
        )
        self._scored(now, bundles, segments, name, forward)

    def _scored(
        self,
        now: Step,
        bundles: Sequence[int],
        segments: Sequence[Sequence[Segment]],
        name: str,
        forward: Callable[[Sequence[MicroBatch]], list[Columns]],
    ) -> None:
        """Store what a forward gives of some bundles; its `logp` as `name`."""
        rows = self.compute.split(segments)
        batches = [MicroBatch(chosen(segments, row), {}) for row in rows]
        for row, one, columns in zip(rows, batches, forward(batches), strict=True):
            for column, flat in columns.items():
                for (b, m), found in zip(row, one.split(flat), strict=True):
                    record, trained = (
                        now.seen[bundles[b], m],
                        int(now.segments[bundles[b]][m].trained.sum()),
                    )
                    setattr(record, name if column == "logp" else column, found[:trained])
                    if column == "value" and len(found) > trained:
                        record.after = float(found[-1])

    def _taught(self, now: Step, teacher: Teacher) -> None:
        """The teacher's log-probabilities, from a model or its server."""
        segments = [
            [teacher.sees(now.sources[b, m], s) for m, s in enumerate(bundle)]
            for b, bundle in enumerate(now.segments)
        ]
        if teacher.server is None:
            assert self.teacher_forward is not None
            self._scored(now, range(len(segments)), segments, "teacher", self.teacher_forward)
            return
        members = now.in_batch(range(len(segments)))
        for member, values in zip(
            members, teacher.server([segments[b][m] for b, m in members]), strict=True
        ):
            now.seen[member].teacher = values


def _penalties(
    now: Step, kind: str, coefficient: float
) -> Iterable[np.ndarray[Any, np.dtype[np.float64]]]:
    """For each episode what the KL takes off each token's reward."""
    for old, ref in zip(now.joined("old"), now.joined("ref"), strict=True):
        yield coefficient * KL[kind](torch.from_numpy(old), torch.from_numpy(ref)).numpy().astype(
            np.float64
        )


def _require_support(episodes: Sequence[Episode]) -> None:
    """Raise ConfigError if truncated sampling cannot be replayed."""
    if any(episode.tokens.support is None for episode in episodes):
        raise ConfigError(
            "rollout.replay_truncation is set, and an episode has no record of the tokens that could be drawn.",
            hint="Episodes from a server or an older run have none: leave the setting out.",
        )


def _beyond(source: Source, segment: Segment) -> Segment:
    """Return a truncated sequence with one more position, whose value is that of the state it was left in."""
    if source.episode.outcome not in CUT or not source.last:
        return segment
    support = None if segment.support is None else np.append(segment.support, no_support(1))
    trained = np.append(segment.trained, True)
    return replace(
        segment, ids=np.append(segment.ids, segment.ids[-1:]), trained=trained, support=support
    )


def _minibatches(groups: int, count: int) -> list[list[int]]:
    """Group indices in `count` parts of nearly equal size; empty parts are left out."""
    return [part.tolist() for part in np.array_split(np.arange(groups), count) if len(part)]


def _explained(seen: Sequence[TokenRecord]) -> dict[str, float]:
    """Explained variance of the values before the update; {} without values, or if the returns are equal."""
    pairs = [(s.value, s.returns) for s in seen if s.value is not None and s.returns is not None]
    if not pairs:
        return {}
    value, returns = (
        torch.from_numpy(np.concatenate(part)).double() for part in zip(*pairs, strict=True)
    )
    share = explained_variance(value, returns)
    return {} if math.isnan(share) else {"value/explained_variance": share}


def _distance(seen: Iterable[TokenRecord]) -> dict[str, float]:
    """`distill/kl`: mean of log p − log p of the teacher over the sampled tokens; {} without a teacher."""
    gaps = [
        one.old - one.teacher for one in seen if one.old is not None and one.teacher is not None
    ]
    return {"distill/kl": float(np.concatenate(gaps).mean())} if gaps else {}


def _keep(records: Sequence[TokenRecord], batch: MicroBatch, columns: Columns) -> None:
    """Store the objective's numbers of every token in its record; `old` only the first time."""
    for name, column in columns.items():
        for record, values in zip(records, batch.split(column), strict=True):
            if name != "old" or record.old is None:
                setattr(record, name, values)
