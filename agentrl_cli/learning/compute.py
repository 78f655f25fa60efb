"""What an update computes with the model: forwards, backwards and the optimizer's step, on prepared micro-batches.

`Compute` does it in this process. A plugin that trains on several GPUs runs it in each of its processes: a
micro-batch is plain numpy and can be sent, its loss is already divided by the totals of the whole mini-batch, and
gradients add up, over micro-batches as over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, RunFailed
from agentrl_cli.learning import advantages
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.forward import Logprobs, logprobs, width
from agentrl_cli.learning.losses import LossConfig, LossInput, Totals, policy_loss
from agentrl_cli.learning.moving_reference import MovingReference
from agentrl_cli.learning.objective import Objective, objective
from agentrl_cli.learning.optimizers import make_optimizer, move_state, trainable
from agentrl_cli.learning.packing import Packed, Rows, Segment, pack
from agentrl_cli.learning.settings import find_aggregation
from agentrl_cli.learning.value import Critic

Columns = dict[str, NDArray[Any]]
"""Numbers of trained tokens by name, [M] each, in a micro-batch's order."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that are computed in one packed row."""

    groups: list[list[Segment]]
    columns: Columns
    """What the loss needs of every trained token: `advantage`, and where it is known `old`, `ref`, `marked`, `sampled`,
    `kept`, `held`, `value`, `returns`."""
    episode_tokens: list[int] | None = None
    """For each sequence the trained tokens of its episode, if an episode has several sequences."""
    padding: bool = False
    """It only keeps ranks in step: computed, and not counted."""

    @property
    def tokens(self) -> int:
        """What its forward costs."""
        return pack(self.groups).tokens

    def split(self, flat: NDArray[Any]) -> list[NDArray[Any]]:
        """[M] to one array for each sequence."""
        sizes = [int(segment.trained.sum()) for group in self.groups for segment in group]
        return np.split(flat, np.cumsum(sizes)[:-1])


@dataclass(frozen=True, slots=True)
class Order:
    """How a mini-batch is trained."""

    loss: LossConfig
    totals: Totals
    """The normalisers of the whole mini-batch."""
    value_rate: float = 1.0
    """Factor on the value head's learning rate."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one optimizer step did."""

    metrics: dict[str, float]
    """Sums over the micro-batches."""
    columns: list[Columns]
    """For each micro-batch: `ratio`, `clipped`, `weight`, `old`."""
    norm: float
    """Norm of the gradient before it is clipped."""
    applied: bool
    """False if the loss or the gradient is not finite: the weights were left as they were."""


class Compute:
    """A model, its optimizer and its value head. See `Learner` for the arguments."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        reference: nn.Module | None = None,
        *,
        checkpoint: bool = False,
        aside: bool = False,
        row_tokens: Callable[[], int] | None = None,
    ) -> None:
        """`row_tokens`: see packing.Rows."""
        algo = config.algo
        self.model = model
        self.config = config
        self.reference = None if algo.ref_ema else reference
        self.checkpoint = checkpoint
        self.aside = aside
        self.rows = Rows(config.train.token_budget, row_tokens)
        self.teacher: Teacher | None = None
        """Whose distribution is part of the loss, if its form compares distributions."""
        self.loss = policy_loss(algo.loss.name)
        self.aggregation = find_aggregation(algo)
        self.trained = trainable(model)
        self.average = (
            MovingReference(self.trained, algo.ref_ema, algo.ref_ema_steps)
            if algo.ref_ema
            else None
        )
        self.optimizer = make_optimizer(model, config.train)
        valued = advantages.needs(algo) == "values"
        self.critic = Critic(width(model), algo, device=self._device) if valued else None

    @property
    def _device(self) -> torch.device:
        return self.trained[0].device

    def fault(self) -> RunFailed | None:
        """Return why the computation cannot continue, noticed while it waits; None if all is well."""
        return None

    def split(self, segments: Sequence[Sequence[Segment]]) -> list[list[tuple[int, int]]]:
        """(bundle, number within it) of the sequences of each micro-batch."""
        return self.rows.of(segments)

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the model's weights."""
        kept: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.average is not None:
            kept["reference"] = self.average.state()
        return kept if self.critic is None else {**kept, "critic": self.critic.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; the model's weights are loaded before."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._rest()
        if self.average is not None and "reference" in state:
            self.average.load(state["reference"])
        if self.critic is not None and "critic" in state:
            self.critic.load(state["critic"])

    # --- an update ---------------------------------------------------------------------------------------------------

    def begin(self, lr: float) -> None:
        """Optimizer steps follow, with this learning rate."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.aside:
            move_state(self.optimizer, self._device)

    def end(self) -> None:
        """The update is done."""
        self.model.eval()
        if self.average is not None:
            self.average.follow()
        self._rest()

    @torch.no_grad()
    def forward(
        self,
        batches: Sequence[MicroBatch],
        *,
        reference: bool = False,
        values: bool = False,
        entropy: bool = False,
    ) -> list[Columns]:
        """`logp` of each micro-batch under the model or the reference, without dropout; other columns on request."""
        off = getattr(self.model, "disable_adapter", None)
        if reference and self.reference is None and off is None and self.average is None:
            raise ConfigError("algo.kl_coef is set without a reference model.")
        model = self.reference if reference and self.reference is not None else self.model
        training = model.training
        model.eval()
        found: list[Columns] = []
        with self._as_reference(off) if reference and self.reference is None else nullcontext():
            for batch in batches:
                out = self._logprobs(model, pack(batch.groups))
                columns = {"logp": out.logp.cpu().numpy()}
                if entropy:
                    columns["entropy"] = out.entropy.cpu().numpy()
                if values and self.critic is not None:
                    columns["value"] = self.critic.values(out.states).cpu().numpy()
                found.append(columns)
        model.train(training)
        return found

    def _as_reference(
        self, off: Callable[[], AbstractContextManager[None]] | None
    ) -> AbstractContextManager[None]:
        """Return the model as the reference: with its moving average, or without its adapter."""
        if self.average is not None:
            return self.average.in_place()
        assert off is not None
        return off()

    def teach(self, teacher: Teacher) -> Callable[[Sequence[MicroBatch]], list[Columns]]:
        """Let the loss use a teacher; return the forward of its model."""
        self.teacher = teacher
        return self.taught

    @torch.no_grad()
    def taught(self, batches: Sequence[MicroBatch]) -> list[Columns]:
        """`logp` of each micro-batch under the teacher; `teacher_states` [M, D] if the loss compares distributions."""
        assert self.teacher is not None
        model = self.teacher.prepare(self.model)
        training = model.training
        model.eval()
        found: list[Columns] = []
        for batch in batches:
            out = self._logprobs(model, pack(batch.groups))
            states = (
                {"teacher_states": out.states.float().cpu().numpy()}
                if self.teacher.wants_states
                else {}
            )
            found.append({"logp": out.logp.cpu().numpy(), **states})
        model.train(training)
        return found

    def step(self, batches: Sequence[MicroBatch], order: Order) -> Stepped:
        """One optimizer step over a mini-batch, or over this rank's part of it."""
        metrics: dict[str, float] = {}
        columns: list[Columns] = []
        for batch in batches:
            found, more = self._backward(batch, order)
            if batch.padding:
                continue
            columns.append(found)
            for name, value in more.items():
                metrics[name] = metrics.get(name, 0.0) + value
        loss = self._add_up(metrics.get("loss", 0.0))
        norm = float(self._clip())
        applied = math.isfinite(norm) and math.isfinite(loss)
        if applied:
            self.optimizer.step()
            if self.critic is not None:
                self.critic.step(order.value_rate, self.config.train.max_grad_norm)
        self._forget()
        return Stepped(metrics, columns, norm, applied)

    def _backward(self, batch: MicroBatch, order: Order) -> tuple[Columns, dict[str, float]]:
        """One packed row forward and backward: its part of the gradient, of the numbers per token and the metrics."""
        packed = pack(batch.groups)
        out = self._logprobs(self.model, packed)
        x = loss_input(batch, packed, out)
        found = objective(x, order.loss, order.totals, self.loss, self.aggregation)
        loss, metrics = found.loss, dict(found.metrics)
        if self.critic is not None:
            old, returns = (
                tensor(batch.columns[name], out.logp.device) for name in ("value", "returns")
            )
            values, old, returns = map(x.among, (self.critic.values(out.states), old, returns))
            part, more = self.critic.loss(values, old, returns, order.totals.tokens)
            loss, metrics = loss + part, {**metrics, **more}
        if self.teacher is not None and self.teacher.wants_states:
            states = tensor(batch.columns["teacher_states"], out.logp.device)
            temperature, tokens = self.config.rollout.temperature, order.totals.tokens
            part = self.teacher.loss(
                self.model, x.among(out.states), x.among(states), temperature, tokens
            )
            loss, metrics = loss + part, {**metrics, "distill/loss": float(part.detach())}
        (0.0 * loss if batch.padding else loss).backward()  # type: ignore[no-untyped-call]
        return _numbers(found, x.old), {"loss": float(loss.detach()), **metrics}

    def _logprobs(self, model: nn.Module, packed: Packed) -> Logprobs:
        temperature = self.config.rollout.temperature
        return logprobs(model, packed, temperature=temperature, checkpoint=self.checkpoint)

    def _add_up(self, loss: float) -> float:
        """Let gradients and loss be those of all ranks; here there is one."""
        return loss

    def _clip(self) -> Tensor:
        """Scale the gradient down to `train.max_grad_norm`. Returns its norm before."""
        return nn.utils.clip_grad_norm_(self.trained, self.config.train.max_grad_norm)

    def _rest(self) -> None:
        if self.aside:
            move_state(self.optimizer, "cpu")

    def _forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.forget()


def loss_input(batch: MicroBatch, packed: Packed, out: Logprobs) -> LossInput:
    """Return the loss's arguments. Without `old` the present log-probabilities are those before the first optimizer
    step.
    """
    device, columns = out.logp.device, batch.columns
    known = {
        name: tensor(columns[name], device)
        for name in ("old", "ref", "sampled", "policy")
        if name in columns
    }
    chosen = {
        name: torch.from_numpy(columns[name].astype(np.bool_)).to(device)
        for name in ("marked", "kept", "held")
        if name in columns
    }
    old, sampled = known.get("old", out.logp.detach()), known.get("sampled")
    if sampled is not None:
        # Unknown log-probabilities of a remote sampler are not corrected; `sampling/unknown` is their share.
        sampled = torch.where(sampled.isnan(), old, sampled)
    sizes = batch.episode_tokens
    return LossInput(
        logp=out.logp,
        old=old,
        advantage=tensor(columns["advantage"], device),
        segment=torch.from_numpy(packed.episode).to(device),
        entropy=out.entropy,
        ref=known.get("ref"),
        sampled=sampled,
        policy=known.get("policy"),
        **chosen,
        episode_tokens=None if sizes is None else torch.tensor(sizes, device=device),
    )


def tensor(flat: NDArray[Any], device: torch.device) -> Tensor:
    """[M] float32 on a device."""
    return torch.from_numpy(np.ascontiguousarray(flat, np.float32)).to(device)


def _numbers(found: Objective, old: Tensor) -> Columns:
    """Return the objective's numbers of every token."""
    weight = found.weight * found.coefficient
    columns = {"ratio": found.ratio, "clipped": found.clipped, "weight": weight, "old": old}
    return {name: column.detach().cpu().numpy() for name, column in columns.items()}
