"""On-policy distillation: a teacher scores the tokens that the student sampled.

The teacher sees the student's own tokens, so only its log-probabilities are needed; with a hint its prompt is longer
than the student's (self-distillation from a privileged prompt, https://arxiv.org/abs/2601.18734). Not here: where a
teacher comes from (trainer/teacher.py), and the advantage itself (advantages.distill).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl_cli.config.estimators import Distill
from agentrl_cli.errors import ConfigError
from agentrl_cli.learning.forward import logit_rules
from agentrl_cli.learning.packing import Segment
from agentrl_cli.learning.step_table import TokenSequence
from agentrl_cli.models.adapter import transformer
from agentrl_cli.types import Episode, Float32, Int32, Origin, no_support

CHUNK = 64
"""Tokens whose logits over the vocabulary are alive at a time."""


@dataclass
class Teacher:
    """A model that scores the student's tokens: one in this process, a server, or the student itself."""

    options: Distill
    model: nn.Module | None = None
    """None: the student's own weights before the step, or a server's."""
    server: Callable[[Sequence[Segment]], list[Float32]] | None = None
    """[n] log-probabilities of the trained tokens of each sequence."""
    hint: Callable[[Episode], Int32] | None = None
    """Ids that the teacher's prompt has at the end of the user's message."""
    _head: nn.Module | None = None

    @property
    def wants_states(self) -> bool:
        """Whether the loss compares distributions, not the sampled token alone."""
        return self.options.form != "sampled"

    def sees(self, sequence: TokenSequence) -> Segment:
        """Return the student's sequence as the teacher gets it.

        Raises ConfigError if a prompt has no text for a hint.
        """
        episode, segment = sequence.episode, sequence.segment
        if self.hint is None:
            return segment
        more = self.hint(episode)
        origin = episode.tokens.origin[sequence.branch.positions]
        first = int(np.flatnonzero(segment.trained)[0]) if segment.trained.any() else len(origin)
        for kind in (Origin.USER, Origin.SYSTEM):
            found = np.flatnonzero(origin[:first] == kind)
            if len(found):
                at = int(found[-1]) + 1
                support = segment.support
                return replace(
                    segment,
                    ids=np.insert(segment.ids, at, more).astype(segment.ids.dtype),
                    trained=np.insert(segment.trained, at, np.zeros(len(more), bool)),
                    support=None
                    if support is None
                    else np.insert(support, at, no_support(len(more))),
                )
        raise ConfigError(
            f"The prompt of episode {episode.id} has no user or system text, where algo.advantage.hint would go."
        )

    def prepare(self, student: nn.Module) -> nn.Module:
        """Return the model that scores a step.

        A head of the student's own that is trained is copied: it will change.
        """
        model = student if self.model is None else self.model
        self._head = transformer(model).get_output_embeddings()
        if (
            self.wants_states
            and self.model is None
            and any(w.requires_grad for w in self._head.parameters())
        ):
            self._head = copy.deepcopy(self._head).requires_grad_(False)
        return model

    def loss(
        self,
        student: nn.Module,
        states: Tensor,
        teacher_states: Tensor,
        temperature: float,
        tokens: int,
    ) -> Tensor:
        """coef × mean over the mini-batch's `tokens` of the reverse KL: this micro-batch's part."""
        assert self._head is not None
        base, other = (
            transformer(student),
            transformer(student if self.model is None else self.model),
        )
        heads = (
            (base.get_output_embeddings(), logit_rules(base.config)),
            (self._head, logit_rules(other.config)),
        )
        kept = self.options.top_k if self.options.form == "top_k" else None
        found = divergence(*heads, states, teacher_states, temperature=temperature, top_k=kept)
        return self.options.coef * found.sum() / max(tokens, 1)


Head = tuple[nn.Module, tuple[float, float | None]]
"""An output layer, with the factor and the soft cap of its logits."""


def divergence(
    student: Head,
    teacher: Head,
    states: Tensor,
    teacher_states: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
) -> Tensor:
    """[M] KL(student || teacher) from hidden states [M, D] and [M, D'], differentiable by the student's side.

    With `top_k` over the student's k likeliest tokens and one class for all others, a lower bound of the whole KL.
    """
    parts: list[Tensor] = [states.new_zeros(0, dtype=torch.float32)]
    for start in range(0, len(states), CHUNK):
        rows = slice(start, start + CHUNK)
        with torch.no_grad():
            target = _log_probabilities(teacher, teacher_states[rows], temperature)
        parts.append(
            checkpoint(
                _chunk, student, states[rows], target, temperature, top_k, use_reentrant=False
            )
        )
    return torch.cat(parts)


def _chunk(
    student: Head, states: Tensor, target: Tensor, temperature: float, top_k: int | None
) -> Tensor:
    own = _log_probabilities(student, states, temperature)
    if own.shape[-1] != target.shape[-1]:  # one of the vocabularies is padded
        width = min(own.shape[-1], target.shape[-1])
        own, target = own[:, :width].log_softmax(-1), target[:, :width].log_softmax(-1)
    if top_k is not None and top_k < own.shape[-1]:
        kept = own.detach().topk(top_k, -1).indices
        own, target = _with_rest(own.gather(-1, kept)), _with_rest(target.gather(-1, kept))
    return (own.exp() * (own - target)).sum(-1)


def _with_rest(logps: Tensor) -> Tensor:
    """[M, k] log-probabilities of some tokens to [M, k + 1]: the last is that of all the others together."""
    rest = (1 - logps.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()
    return torch.cat([logps, rest], -1)


def _log_probabilities(head: Head, states: Tensor, temperature: float) -> Tensor:
    module, (scale, cap) = head
    weight: Any = next(module.parameters())
    logits = module(states.to(weight.dtype)).float() * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(logits / temperature, -1)
