"""One training step's arithmetic: advantages, packed forwards, the objective, the optimizer; and what every token got.

Gradients of micro-batches add up to that of the whole mini-batch, because every normaliser is the mini-batch's own
total. With one epoch and one mini-batch the log-probabilities before the first optimizer step are those of the only
forward, so no second one is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl_cli.algos.advantages import ADVANTAGES
from agentrl_cli.algos.inputs import AdvantageInput
from agentrl_cli.algos.losses import AGGREGATIONS, LOSSES, LossConfig, LossInput, Objective, Totals, mark, objective
from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, TrainingStopped
from agentrl_cli.policies.forward import Packed, Segment, chosen, logprobs, micro_batches, pack
from agentrl_cli.registry import resolve
from agentrl_cli.types import Episode, Float32, TrainSignals

Member = tuple[int, int]
"""(group, member)"""


@dataclass
class _Seen:
    """Per trained token, for one episode; the arrays have its number of trained tokens."""

    advantage: Float32
    old: Float32 | None = None
    ref: Float32 | None = None
    ratio: Float32 | None = None
    clipped: np.ndarray[Any, Any] | None = None
    weight: Float32 | None = None


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
        reference: The model that the KL term compares with; None where there is none, or where `model` is a peft
            model, which without its adapter is the reference.
    """

    def __init__(self, model: nn.Module, config: Config, reference: nn.Module | None = None) -> None:
        algo = config.algo
        if config.rollout.temperature <= 0:
            raise ConfigError("Training needs rollout.temperature above 0: greedy attempts are all the same.")
        self.model = model
        self.config = config
        self.reference = reference
        self.estimator = resolve("advantages", ADVANTAGES, algo.advantage)
        self.loss = resolve("losses", LOSSES, algo.loss)
        self.aggregation = resolve("aggregations", AGGREGATIONS, algo.aggregation)
        truncated = config.rollout.top_p < 1 or config.rollout.top_k > 0
        self.loss_config = LossConfig(
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            kl_coef=algo.kl_coef,
            entropy_coef=algo.entropy_coef,
            correction="tis" if truncated else "none",
        )
        self.truncated = truncated
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ConfigError("Nothing is trainable: all weights are frozen and there is no adapter.")
        train = config.train
        self.optimizer = torch.optim.AdamW(trained, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay)
        self.trained = trained

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then constant, or linear or cosine decay to zero at the last step."""
        train = self.config.train
        if step < train.warmup_steps:
            return train.lr * (step + 1) / train.warmup_steps
        done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))}
        return train.lr * max(0.0, factor[train.schedule])

    def update(self, groups: Sequence[Sequence[Episode]], step: int) -> Update:
        """Train on groups of episodes, all of which count. Raises TrainingStopped for a loss that is not a number."""
        flat = [episode for group in groups for episode in group]
        result = Update()
        if not flat:
            return result
        advantages = self.estimator(AdvantageInput.of(flat))
        segments = [[Segment.of(episode) for episode in group] for group in groups]
        members = [(g, m) for g, group in enumerate(groups) for m in range(len(group))]
        seen = {member: _Seen(a) for member, a in zip(members, advantages, strict=True)}
        algo = self.config.algo
        self.model.eval()  # no dropout in what the ratio and the KL are relative to
        if algo.epochs * algo.minibatches > 1:
            self._before(segments, seen, "old", self.model)
        if algo.kl_coef:
            self._reference(segments, seen)
        self.model.train()
        lr = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sums: dict[str, list[float]] = {}
        for _ in range(algo.epochs):
            for batch in _minibatches(len(groups), algo.minibatches):
                for name, value in self._minibatch(groups, segments, seen, batch).items():
                    sums.setdefault(name, []).append(value)
        self.model.eval()
        result.metrics = {name: float(np.mean(values)) for name, values in sums.items()} | {"learning_rate": lr}
        for (g, m), facts in seen.items():
            episode = groups[g][m]
            result.signals[episode.id] = _signals(episode, facts)
            result.advantages[episode.id] = float(facts.advantage.mean()) if len(facts.advantage) else 0.0
        result.metrics |= _gap(groups, seen)
        return result

    # --- a mini-batch ------------------------------------------------------------------------------------------------

    def _minibatch(
        self,
        groups: Sequence[Sequence[Episode]],
        segments: list[list[Segment]],
        seen: dict[Member, _Seen],
        batch: Sequence[int],
    ) -> dict[str, float]:
        """One optimizer step over some groups; metrics add up over its micro-batches."""
        picked = [segments[g] for g in batch]
        sizes = [int(s.trained.sum()) for group in picked for s in group]
        totals = Totals(sum(sizes), len(sizes), self.config.rollout.max_tokens)
        metrics: dict[str, float] = {}
        for row in micro_batches(picked, self.config.train.token_budget):
            row_members = [(batch[g], m) for g, m in row]
            packed = pack(chosen(picked, row))
            out = logprobs(self.model, packed, temperature=self.config.rollout.temperature)
            x = self._input(
                packed, out.logp, out.entropy, [seen[member] for member in row_members], row_members, groups
            )
            found = objective(x, self.loss_config, totals, self.loss, self.aggregation)
            found.loss.backward()  # type: ignore[no-untyped-call]
            self._keep(packed, found, x.old, [seen[member] for member in row_members])
            for name, value in {"loss": float(found.loss.detach()), **found.metrics}.items():
                metrics[name] = metrics.get(name, 0.0) + value
        norm = float(nn.utils.clip_grad_norm_(self.trained, self.config.train.max_grad_norm))
        if not math.isfinite(norm) or not math.isfinite(metrics.get("loss", 0.0)):
            self.optimizer.zero_grad(set_to_none=True)
            if "nan" in self.config.train.stop_on:
                raise TrainingStopped(
                    f"nan: the gradient norm is {norm}; the weights were left as they were.",
                    hint="Lower train.lr or train.max_grad_norm; look at the last episodes with `agentrl replay last`.",
                )
            return {"grad_norm": norm}
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**metrics, "grad_norm": norm}

    def _input(
        self,
        packed: Packed,
        logp: Tensor,
        entropy: Tensor,
        facts: Sequence[_Seen],
        members: Sequence[Member],
        groups: Sequence[Sequence[Episode]],
    ) -> LossInput:
        def flat(arrays: Sequence[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(packed.gather(arrays), np.float32)).to(logp.device)

        old = logp.detach() if facts[0].old is None else flat([f.old for f in facts])
        advantage = flat([f.advantage for f in facts])
        sampled = None
        if self.truncated:
            episodes = [groups[g][m] for g, m in members]
            sampled = flat([e.tokens.logp_sampled[e.tokens.trained_mask] for e in episodes])
        return LossInput(
            logp=logp,
            old=old,
            advantage=advantage,
            segment=torch.from_numpy(packed.episode).to(logp.device),
            entropy=entropy,
            ref=None if facts[0].ref is None else flat([f.ref for f in facts]),
            sampled=sampled,
            marked=mark(self.config.algo.loss, logp.detach(), advantage, self.loss_config),
        )

    def _keep(self, packed: Packed, found: Objective, old: Tensor, facts: Sequence[_Seen]) -> None:
        weight = (found.weight * found.coefficient).detach()
        columns = {"ratio": found.ratio, "clipped": found.clipped, "weight": weight}
        for name, column in columns.items():
            for fact, values in zip(facts, packed.split(column.detach().cpu().numpy()), strict=True):
                setattr(fact, name, values)
        for fact, values in zip(facts, packed.split(old.detach().cpu().numpy()), strict=True):
            if fact.old is None:
                fact.old = values

    # --- other forwards ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(self, segments: list[list[Segment]], seen: dict[Member, _Seen], name: str, model: nn.Module) -> None:
        """Log-probabilities of all trained tokens under a model, without gradient."""
        for row in micro_batches(segments, self.config.train.token_budget):
            packed = pack(chosen(segments, row))
            out = logprobs(model, packed, temperature=self.config.rollout.temperature)
            for member, values in zip(row, packed.split(out.logp.cpu().numpy()), strict=True):
                setattr(seen[member], name, values)

    def _reference(self, segments: list[list[Segment]], seen: dict[Member, _Seen]) -> None:
        """Reference log-probabilities: the same weights with the adapter off, or the reference model."""
        off = getattr(self.model, "disable_adapter", None)
        if self.reference is not None:
            self._before(segments, seen, "ref", self.reference)
        elif off is not None:
            with off():
                self._before(segments, seen, "ref", self.model)
        else:
            raise ConfigError("algo.kl_coef is set, and there is no reference model.")


def _minibatches(groups: int, count: int) -> list[list[int]]:
    """Group indices in `count` parts of nearly equal size; empty parts are left out."""
    return [part.tolist() for part in np.array_split(np.arange(groups), count) if len(part)]


def _signals(episode: Episode, facts: _Seen) -> TrainSignals:
    """[n] arrays over all tokens of an episode, NaN where a token was not trained."""
    mask = episode.tokens.trained_mask

    def whole(values: Any) -> Float32:
        out = np.full(len(mask), np.nan, np.float32)
        if values is not None:
            out[mask] = values
        return out

    clipped = np.zeros(len(mask), np.int8)
    if facts.clipped is not None:
        clipped[mask] = facts.clipped
    return TrainSignals(
        advantage=whole(facts.advantage),
        logp_train=whole(facts.old),
        ratio=whole(facts.ratio),
        clipped=clipped,
        weight=whole(facts.weight),
        logp_ref=None if facts.ref is None else whole(facts.ref),
    )


def _gap(groups: Sequence[Sequence[Episode]], seen: Mapping[Member, _Seen]) -> dict[str, float]:
    """How far the sampler's log-probabilities lie from the trainer's: the same weights, so rounding only."""
    gaps = [
        np.abs(facts.old - groups[g][m].tokens.logp_policy[groups[g][m].tokens.trained_mask])
        for (g, m), facts in seen.items()
        if facts.old is not None and len(facts.old)
    ]
    if not gaps:
        return {}
    flat = np.concatenate(gaps)
    return {
        "sampling/sampling_logp_difference/mean": float(flat.mean()),
        "sampling/sampling_logp_difference/max": float(flat.max()),
    }
