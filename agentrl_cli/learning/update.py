"""One training step: advantages, packed forwards, the objective, the optimizer, and a record of every token.

Gradients of micro-batches add up to that of the whole mini-batch, because every normaliser is the mini-batch's own
total. With one epoch and one mini-batch the log-probabilities before the first optimizer step are those of the only
forward, so no second one is made, unless advantages depend on it (values, KL in the reward).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, TrainingStopped
from agentrl_cli.learning import advantages
from agentrl_cli.learning.coefficients import Coefficients
from agentrl_cli.learning.dispositions import CUT
from agentrl_cli.learning.estimator_inputs import AdvantageInput
from agentrl_cli.learning.forward import Logprobs, logprobs, width
from agentrl_cli.learning.kl import KL
from agentrl_cli.learning.losses import LossInput, Objective, Totals, find, mark, objective, policy_loss
from agentrl_cli.learning.optimizers import learning_rate, make_optimizer, move_state, trainable
from agentrl_cli.learning.packing import Packed, Segment, chosen, micro_batches, pack
from agentrl_cli.learning.settings import find_aggregation, loss_config
from agentrl_cli.learning.step import Source, Step
from agentrl_cli.learning.token_record import Member, TokenRecord, gap, signals
from agentrl_cli.learning.turn_advantages import value_targets
from agentrl_cli.learning.value import Critic, explained_variance
from agentrl_cli.types import Episode, TrainSignals


@dataclass
class Update:
    """What a step did: metrics under TRL's names where it has one, and signals by episode id."""

    metrics: dict[str, float] = field(default_factory=dict)
    signals: dict[str, TrainSignals] = field(default_factory=dict)
    advantages: dict[str, float] = field(default_factory=dict)


class Learner:
    """A model, its optimizer and the configured algorithm.

    Args:
        model: A causal LM, peft-wrapped or not; what requires a gradient is trained.
        reference: The model that the KL term compares with; None if there is no KL term, or if `model` is a peft
            model, which without its adapter is the reference.
        checkpoint: Recompute activations in the backward pass.
        aside: Between updates the optimizer's state waits in the CPU's memory (one of plan.MOVES).
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        reference: nn.Module | None = None,
        *,
        checkpoint: bool = False,
        aside: bool = False,
    ) -> None:
        algo = config.algo
        if config.rollout.temperature <= 0:
            raise ConfigError("Training needs rollout.temperature above 0: greedy attempts are all the same.")
        self.model = model
        self.config = config
        self.reference = reference
        self.checkpoint = checkpoint
        self.aside = aside
        self.estimator = advantages.function(algo.advantage.name)
        self.needs = advantages.needs(algo)
        self.loss = policy_loss(algo.loss.name)
        self.marks = bool(find(algo.loss.name).mark)
        self.aggregation = find_aggregation(algo)
        self.loss_config = loss_config(config)
        self.coefficients = Coefficients.of(algo)
        trained = trainable(model)
        self.optimizer = make_optimizer(model, config.train)
        self.trained = trained
        self.critic = Critic(width(model), algo, device=trained[0].device) if self.needs == "values" else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the model's weights."""
        kept: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "coefficients": self.coefficients.state()}
        return kept if self.critic is None else {**kept, "critic": self.critic.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._rest()
        if "coefficients" in state:
            self.coefficients.load(state["coefficients"])
        if self.critic is not None and "critic" in state:
            self.critic.load(state["critic"])

    def learning_rate(self, step: int) -> float:
        """The policy's learning rate in a step."""
        return learning_rate(self.config.train, step)

    def update(
        self, groups: Sequence[Sequence[Episode]], step: int, baselines: Mapping[str, float] | None = None
    ) -> Update:
        """Train on groups of episodes, all of which count. Raises TrainingStopped if the loss is NaN.

        `baselines`: reward of the greedy attempt by group id, for an estimator that needs it.
        """
        result = Update()
        if not any(groups):
            return result
        now, algo = Step.of(step, groups), self.config.algo
        self.model.eval()  # no dropout in what the ratio and the KL are relative to
        in_reward = bool(algo.kl_coef) and algo.kl_in == "reward"
        if algo.epochs * algo.minibatches > 1 or self.critic is not None or in_reward:
            self._before(now, "old", self.model)
        if algo.kl_coef:
            self._reference(now)
        self._advantages(now, baselines, in_reward)
        self.model.train()
        lr = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.aside:
            move_state(self.optimizer, self.trained[0].device)
        sums: dict[str, list[float]] = {}
        for epoch in range(algo.epochs):
            for number, batch in enumerate(_minibatches(len(groups), algo.minibatches)):
                for name, value in self._minibatch(now, now.batch(batch), lr, (epoch, number)).items():
                    sums.setdefault(name, []).append(value)
        self.model.eval()
        self._rest()
        result.metrics = {name: float(np.mean(values)) for name, values in sums.items()} | {"learning_rate": lr}
        result.metrics |= self.coefficients.metrics() | _explained(list(now.seen.values()))
        result.metrics |= gap((one.old, now.sources[m].sampled("logp_policy")) for m, one in now.seen.items())
        self.coefficients.adapt(result.metrics, sum(episode.trained_tokens for episode in now.episodes))
        for episode, seen in now.records():
            result.signals[episode.id] = signals(episode, seen)
            result.advantages[episode.id] = float(seen.advantage.mean()) if len(seen.advantage) else 0.0
        return result

    def _advantages(self, now: Step, baselines: Mapping[str, float] | None, in_reward: bool) -> None:
        """Fill in every token's advantage, and with a value head its return."""
        episodes = now.episodes
        fields = advantages.options(self.config.algo)
        if baselines is not None and self.needs == "baseline":
            fields["baseline"] = np.array([baselines[e.group_id or ""] for e in episodes], np.float64)
        if self.critic is not None:
            fields["values"] = tuple(np.asarray(values, np.float64) for values in now.joined("value"))
            fields["bootstrap"] = np.array(now.after(), np.float64)
        if in_reward:
            estimate = KL[self.config.algo.kl]
            both = zip(now.joined("old"), now.joined("ref"), strict=True)
            pairs = [(torch.from_numpy(old), torch.from_numpy(ref)) for old, ref in both]
            fields["token_penalty"] = tuple(
                self.coefficients.kl * estimate(old, ref).numpy().astype(np.float64) for old, ref in pairs
            )
        x = AdvantageInput.of(episodes, **fields)
        now.give("advantage", self.estimator(x))
        if self.critic is not None:
            now.give("returns", value_targets(x))

    # --- a mini-batch ------------------------------------------------------------------------------------------------

    def _minibatch(self, now: Step, batch: Sequence[int], lr: float, place: tuple[int, int]) -> dict[str, float]:
        """One optimizer step over some bundles; metrics add up over its micro-batches."""
        picked = [now.segments[b] for b in batch]
        sizes = [int(s.trained.sum()) for bundle in picked for s in bundle]
        episodes = len({now.sources[member].number for member in now.in_batch(batch)})
        totals = Totals(sum(sizes), len(sizes), self.config.rollout.max_tokens, episodes)
        if self.marks:
            self._mark(now, batch, seed=hash((now.number, *place)) % 2**31)
        metrics: dict[str, float] = {}
        for row in micro_batches(picked, self.config.train.token_budget):
            for name, value in self._microbatch(now, picked, [(batch[b], m) for b, m in row], row, totals).items():
                metrics[name] = metrics.get(name, 0.0) + value
        norm = float(nn.utils.clip_grad_norm_(self.trained, self.config.train.max_grad_norm))
        if not math.isfinite(norm) or not math.isfinite(metrics.get("loss", 0.0)):
            self._forget()
            if "nan" in self.config.train.stop_on:
                raise TrainingStopped(
                    f"nan: the gradient norm is {norm}; the weights were left as they were.",
                    hint="Lower train.lr or train.max_grad_norm; look at the last episodes with `agentrl replay last`.",
                )
            return {"loss": metrics.get("loss", math.nan), "grad_norm": norm}
        self.optimizer.step()
        if self.critic is not None:
            self.critic.step(lr / self.config.train.lr, self.config.train.max_grad_norm)
        self._forget()
        return {**metrics, "grad_norm": norm}

    def _microbatch(
        self, now: Step, picked: list[list[Segment]], members: list[Member], row: Sequence[Member], totals: Totals
    ) -> dict[str, float]:
        """One packed row forward and backward: its part of the gradient and of the metrics."""
        facts = [now.seen[member] for member in members]
        packed = pack(chosen(picked, row))
        temperature = self.config.rollout.temperature
        out = logprobs(self.model, packed, temperature=temperature, checkpoint=self.checkpoint)
        x = self._input(packed, out, facts, now, members)
        found = objective(x, self.coefficients.apply(self.loss_config), totals, self.loss, self.aggregation)
        loss, metrics = found.loss, dict(found.metrics)
        if self.critic is not None:
            old, returns = (_flat(packed, facts, name, out.logp.device) for name in ("value", "returns"))
            part, more = self.critic.loss(self.critic.values(out.states), old, returns, totals.tokens)
            loss, metrics = loss + part, {**metrics, **more}
        loss.backward()  # type: ignore[no-untyped-call]
        _keep(packed, found, x.old, facts)
        return {"loss": float(loss.detach()), **metrics}

    def _input(
        self, packed: Packed, out: Logprobs, facts: Sequence[TokenRecord], now: Step, members: Sequence[Member]
    ) -> LossInput:
        device = out.logp.device

        def given(name: str) -> Tensor | None:
            return None if getattr(facts[0], name) is None else _flat(packed, facts, name, device)

        old, marked = given("old"), given("marked")
        sampled = None
        if self.loss_config.correction != "none":
            sampled = _tensor(packed.gather([now.sources[m].sampled("logp_sampled") for m in members]), device)
            # Unknown log-probabilities of a remote sampler are not corrected; `sampling/unknown` is their share.
            sampled = torch.where(sampled.isnan(), out.logp.detach() if old is None else old, sampled)
        return LossInput(
            logp=out.logp,
            old=out.logp.detach() if old is None else old,
            advantage=_flat(packed, facts, "advantage", device),
            segment=torch.from_numpy(packed.episode).to(device),
            entropy=out.entropy,
            ref=given("ref"),
            sampled=sampled,
            marked=None if marked is None else marked.bool(),
            episode_tokens=torch.tensor(now.sizes(members), device=device) if now.branched else None,
        )

    def _mark(self, now: Step, batch: Sequence[int], seed: int) -> None:
        """Let the loss choose tokens over the whole mini-batch."""
        members = now.in_batch(batch)
        self.model.eval()
        self._before(now, "now", self.model, batch)
        self.model.train()
        facts = [now.seen[member] for member in members]
        names = ("now", "advantage", "now" if facts[0].old is None else "old")
        logp, advantage, old = (torch.from_numpy(np.concatenate([getattr(one, n) for one in facts])) for n in names)
        marked = mark(self.config.algo.loss, logp, advantage, seed, old)
        assert marked is not None
        ends = np.cumsum([len(one.advantage) for one in facts])[:-1]
        for one, part in zip(facts, np.split(marked.numpy(), ends), strict=True):
            one.marked = part

    def _rest(self) -> None:
        if self.aside:
            move_state(self.optimizer, "cpu")

    def _forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.forget()

    # --- other forwards ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(self, now: Step, name: str, model: nn.Module, batch: Sequence[int] | None = None) -> None:
        """Log-probabilities of trained tokens under a model, without gradient; with `old` come the values."""
        bundles = range(len(now.segments)) if batch is None else batch
        segments = [now.segments[b] for b in bundles]
        if name == "old" and self.critic is not None and self.config.algo.value_bootstrap:
            segments = [[_beyond(now.sources[b, m], s) for m, s in enumerate(now.segments[b])] for b in bundles]
        for row in micro_batches(segments, self.config.train.token_budget):
            packed = pack(chosen(segments, row))
            out = logprobs(model, packed, temperature=self.config.rollout.temperature)
            columns = {name: out.logp}
            if name == "old" and self.critic is not None:
                columns["value"] = self.critic.values(out.states)
            for column, flat in columns.items():
                for (b, m), values in zip(row, packed.split(flat.cpu().numpy()), strict=True):
                    one = now.seen[bundles[b], m]
                    trained = int(now.segments[bundles[b]][m].trained.sum())
                    setattr(one, column, values[:trained])
                    if column == "value" and len(values) > trained:
                        one.after = float(values[-1])

    def _reference(self, now: Step) -> None:
        """Reference log-probabilities: the same weights with the adapter off, or the reference model."""
        off = getattr(self.model, "disable_adapter", None)
        if self.reference is not None:
            self._before(now, "ref", self.reference)
        elif off is not None:
            with off():
                self._before(now, "ref", self.model)
        else:
            raise ConfigError("algo.kl_coef is set without a reference model.")


def _beyond(source: Source, segment: Segment) -> Segment:
    """A truncated sequence with one more position, whose value is that of the state it was left in."""
    if source.episode.outcome not in CUT or not source.last:
        return segment
    return replace(segment, ids=np.append(segment.ids, segment.ids[-1:]), trained=np.append(segment.trained, True))


def _minibatches(groups: int, count: int) -> list[list[int]]:
    """Group indices in `count` parts of nearly equal size; empty parts are left out."""
    return [part.tolist() for part in np.array_split(np.arange(groups), count) if len(part)]


def _explained(seen: Sequence[TokenRecord]) -> dict[str, float]:
    """Explained variance of the values before the update; {} without values, or if the returns are equal."""
    pairs = [(s.value, s.returns) for s in seen if s.value is not None and s.returns is not None]
    if not pairs:
        return {}
    value, returns = (torch.from_numpy(np.concatenate(part)).double() for part in zip(*pairs, strict=True))
    share = explained_variance(value, returns)
    return {} if math.isnan(share) else {"value/explained_variance": share}


def _tensor(flat: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(flat, np.float32)).to(device)


def _flat(packed: Packed, facts: Sequence[TokenRecord], name: str, device: torch.device) -> Tensor:
    """[M] one field of the records, in the row's order."""
    return _tensor(packed.gather([getattr(one, name) for one in facts]), device)


def _keep(packed: Packed, found: Objective, old: Tensor, facts: Sequence[TokenRecord]) -> None:
    """Store the objective's numbers of every token in its record."""
    weight = (found.weight * found.coefficient).detach()
    columns = {"ratio": found.ratio, "clipped": found.clipped, "weight": weight}
    for name, column in columns.items():
        for fact, values in zip(facts, packed.split(column.detach().cpu().numpy()), strict=True):
            setattr(fact, name, values)
    for fact, values in zip(facts, packed.split(old.detach().cpu().numpy()), strict=True):
        if fact.old is None:
            fact.old = values
