"""Forwards, backwards and the optimizer's step on prepared micro-batches.

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

from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.errors import ConfigError, RunFailed
from agentrl_cli.hooks.waits import advance
from agentrl_cli.learning import advantages
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.forward import Logprobs, logprobs, width
from agentrl_cli.learning.losses import LossConfig, LossInput, Totals, policy_loss
from agentrl_cli.learning.moving_reference import MovingReference
from agentrl_cli.learning.objective import find_aggregation, objective
from agentrl_cli.learning.optimizers import make_optimizer, move_state, trainable
from agentrl_cli.learning.packing import Packed, Rows, Segment, pack
from agentrl_cli.learning.step_table import TokenColumns, TokenResults
from agentrl_cli.learning.value import Critic
from agentrl_cli.models.adapter import eval_mode, switch_length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that are computed in one packed row."""

    groups: list[list[Segment]]
    columns: TokenColumns | None = None
    """What the loss needs of every trained token; None for a forward alone."""
    episode_tokens: list[int] | None = None
    """For each sequence the trained tokens of its episode, if an episode has several sequences."""
    padding: bool = False
    """It only keeps ranks in step: computed, and not counted."""

    @property
    def tokens(self) -> int:
        """Tokens of its forward."""
        return pack(self.groups).tokens


@dataclass(frozen=True, slots=True)
class StepSpec:
    """How a mini-batch is trained."""

    loss: LossConfig
    totals: Totals
    """The normalisers of the whole mini-batch."""
    value_rate: float
    """Factor on the value head's learning rate."""
    max_norm: float
    """`train.max_grad_norm` now: a control may change it, and other ranks have settings of their own."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Numbers that a forward gives of a micro-batch's trained tokens, [M] each."""

    logp: NDArray[Any]
    entropy: NDArray[Any] | None = None
    value: NDArray[Any] | None = None
    states: NDArray[Any] | None = None
    """[M, D] hidden states."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Numbers of one optimizer step."""

    metrics: dict[str, float]
    """Sums over the micro-batches."""
    tokens: list[TokenResults]
    """One for each micro-batch."""
    norm: float
    """Norm of the gradient before it is clipped."""
    applied: bool
    """False if the loss or the gradient is not finite: the weights were left as they were."""


class Compute:
    """A model, its optimizer and its value head. See `Learner` for the arguments."""

    def __init__(
        self,
        model: nn.Module,
        config: LearnerSettings,
        reference: nn.Module | None = None,
        *,
        checkpoint: bool = False,
        aside: bool = False,
        row_tokens: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """`row_tokens`: see packing.Rows."""
        algo = config.algo
        self.model = model
        self.config = config
        self.reference = None if algo.kl.ref_ema else reference
        self.checkpoint = checkpoint
        self.aside = aside
        self.rows = Rows(config.train.token_budget, row_tokens, switch_length(model))
        self.teacher: Teacher | None = None
        """Whose distribution is part of the loss, if its form compares distributions."""
        self.loss = policy_loss(algo.loss.name)
        self.aggregation = find_aggregation(algo)
        self.trained = trainable(model)
        self.average = (
            MovingReference(self.trained, algo.kl.ref_ema, algo.kl.ref_ema_steps)
            if algo.kl.ref_ema
            else None
        )
        self.optimizer = make_optimizer(model, config.train)
        valued = advantages.needs(algo) == "values"
        self.critic = Critic(width(model), algo.value_head, device=self._device) if valued else None

    @property
    def _device(self) -> torch.device:
        return self.trained[0].device

    def fault(self) -> RunFailed | None:
        """Return None: nothing is waited for here."""
        return None

    def split(self, segments: Sequence[Sequence[Segment]]) -> list[list[tuple[int, int]]]:
        """Return (bundle, number within it) of the sequences of each micro-batch."""
        return self.rows.of(segments)

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without the model's weights."""
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
        """Prepare for optimizer steps at this learning rate."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.aside:
            move_state(self.optimizer, self._device)

    def end(self) -> None:
        """Finish an update: the moving reference follows, and the optimizer's state waits where it should."""
        self.model.eval()
        if self.average is not None:
            self.average.follow()
        self._rest()

    @torch.no_grad()
    def forward(
        self,
        batches: Sequence[MicroBatch],
        *,
        under: str = "model",
        values: bool = False,
        entropy: bool = False,
    ) -> list[TokenScores]:
        """Score each micro-batch under the model, its reference or its teacher, without dropout.

        Values and entropy on request; a teacher's states where the loss compares distributions.
        """
        model, place = self._find_model(under)
        states = under == "teacher" and self.teacher is not None and self.teacher.wants_states
        found: list[TokenScores] = []
        with place, eval_mode(model):
            for batch in batches:
                out = self._logprobs(model, pack(batch.groups))
                value = self.critic.values(out.states) if values and self.critic else None
                found.append(
                    TokenScores(
                        _numpy(out.logp),
                        entropy=_numpy(out.entropy) if entropy else None,
                        value=None if value is None else _numpy(value),
                        states=_numpy(out.states.float()) if states else None,
                    )
                )
        return found

    def _find_model(self, under: str) -> tuple[nn.Module, AbstractContextManager[None]]:
        """Return what computes: a reference may be this model with its moving average, or without its adapter."""
        model: Any = self.model
        if under == "model":
            return model, nullcontext()
        if under == "teacher":
            assert self.teacher is not None
            return self.teacher.prepare(model), nullcontext()
        if self.reference is not None:
            return self.reference, nullcontext()
        if self.average is not None:
            return model, self.average.in_place()
        if not hasattr(model, "disable_adapter"):
            raise ConfigError("algo.kl.coef is set without a reference model.")
        return model, model.disable_adapter()

    def teach(self, teacher: Teacher) -> None:
        """Let the loss, and a forward under it, use a teacher."""
        self.teacher = teacher

    def step(self, batches: Sequence[MicroBatch], spec: StepSpec) -> StepResult:
        """Make one optimizer step over a mini-batch, or over this rank's part of it."""
        metrics: dict[str, float] = {}
        tokens: list[TokenResults] = []
        for batch in batches:
            found, more = self._backward(batch, spec)
            if batch.padding:
                continue
            tokens.append(found)
            for name, value in more.items():
                metrics[name] = metrics.get(name, 0.0) + value
        loss = self._add_up(metrics.get("loss", 0.0))
        norm = float(self._clip(spec.max_norm))
        applied = math.isfinite(norm) and math.isfinite(loss)
        if applied:
            self.optimizer.step()
            if self.critic is not None:
                self.critic.step(spec.value_rate, spec.max_norm)
        self._forget()
        return StepResult(metrics, tokens, norm, applied)

    def _backward(self, batch: MicroBatch, spec: StepSpec) -> tuple[TokenResults, dict[str, float]]:
        """One packed row forward and backward: its part of the gradient, of the numbers per token and the metrics."""
        packed, known = pack(batch.groups), batch.columns
        assert known is not None
        out = self._logprobs(self.model, packed)
        x = loss_input(batch, known, packed, out, spec.loss)
        found = objective(x, spec.loss, spec.totals, self.loss, self.aggregation)
        loss, metrics = found.loss, dict(found.metrics)
        if self.critic is not None:
            assert known.value is not None and known.returns is not None
            old, returns = (tensor(one, out.logp.device) for one in (known.value, known.returns))
            values = self.critic.values(out.states)
            part, more = self.critic.loss(values, old, returns, spec.totals.tokens)
            loss, metrics = loss + part, {**metrics, **more}
        if known.teacher_states is not None and self.teacher is not None:
            states = tensor(known.teacher_states, out.logp.device)
            temperature, tokens = self.config.rollout.temperature, spec.totals.tokens
            part = self.teacher.loss(self.model, out.states, states, temperature, tokens)
            loss, metrics = loss + part, {**metrics, "distill/loss": float(part.detach())}
        (0.0 * loss if batch.padding else loss).backward()  # type: ignore[no-untyped-call]
        numbers = (found.ratio, found.clipped, found.weight * found.coefficient, x.old)
        results = TokenResults(*(_numpy(one.detach()) for one in numbers))
        return results, {"loss": float(loss.detach()), **metrics}

    def _logprobs(self, model: nn.Module, packed: Packed) -> Logprobs:
        advance()
        temperature = self.config.rollout.temperature
        again = self.checkpoint or self.rows.recomputes(packed.tokens)
        return logprobs(model, packed, temperature=temperature, checkpoint=again)

    def _add_up(self, loss: float) -> float:
        """Let gradients and loss be those of all ranks; here there is one."""
        return loss

    def _clip(self, max_norm: float) -> Tensor:
        """Scale the gradient down to a norm. Returns its norm before."""
        return nn.utils.clip_grad_norm_(self.trained, max_norm)

    def _rest(self) -> None:
        if self.aside:
            move_state(self.optimizer, "cpu")

    def _forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)


def loss_input(
    batch: MicroBatch, known: TokenColumns, packed: Packed, out: Logprobs, c: LossConfig
) -> LossInput:
    """Return the loss's arguments. Without old log-probabilities the present ones are those before the first
    optimizer step.
    """
    device = out.logp.device

    def known_or_none(column: NDArray[Any] | None) -> Tensor | None:
        return None if column is None else tensor(column, device)

    old = out.logp.detach() if known.old_logp is None else tensor(known.old_logp, device)
    sampled = known_or_none(known.sampled_logp) if c.correction != "none" else None
    if sampled is not None:
        # Unknown log-probabilities of a remote sampler are not corrected; `sampling/unknown` is their share.
        sampled = torch.where(sampled.isnan(), old, sampled)
    sizes = batch.episode_tokens
    return LossInput(
        logp=out.logp,
        old=old,
        advantage=tensor(known.advantage, device),
        segment=torch.from_numpy(packed.episode).to(device),
        entropy=out.entropy,
        ref=known_or_none(known.ref_logp),
        sampled=sampled,
        policy=known_or_none(known.sampler_logp) if c.off_policy is not None else None,
        selected=known_or_none(known.selected),
        entropy_masked=known_or_none(known.entropy_masked),
        episode_tokens=None if sizes is None else torch.tensor(sizes, device=device),
    )


def tensor(flat: NDArray[Any], device: torch.device) -> Tensor:
    """[M] on a device, float32 or bool."""
    kind = np.bool_ if flat.dtype == np.bool_ else np.float32
    return torch.from_numpy(np.ascontiguousarray(flat, kind)).to(device)


def _numpy(column: Tensor) -> NDArray[Any]:
    return column.cpu().numpy()
