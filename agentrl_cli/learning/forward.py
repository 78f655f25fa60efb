"""The training forward: log-probabilities of the trained tokens of a packed row.

Runs any transformers causal LM over the row, with attention restricted per episode (attention.py), and the head only at
positions that predict a trained token, in chunks (logprobs.py). The numbers and gradients are those of one episode at a
time. Transformers' own packing by position_ids leaks attention across episodes unless use_cache is False.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from agentrl_cli.errors import ModelError
from agentrl_cli.learning.attention import NotPackable, Packing, packed_attention
from agentrl_cli.learning.fused_forward import fused_states
from agentrl_cli.learning.logprobs import head_logprobs
from agentrl_cli.learning.packing import Packed, Segment, pack
from agentrl_cli.models.adapter import transformer
from agentrl_cli.models.vision import positions, reader_of

_LOG = logging.getLogger(__name__)
_ONE_BY_ONE: WeakSet[Any] = WeakSet()
"""Models that turned out not to be packable."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """[M] float32 each, aligned with `Packed.rows`, differentiable."""

    logp: Tensor
    entropy: Tensor
    states: Tensor
    """[M, D] the hidden states that they were read off, in the model's dtype (what a value head reads)."""


def logprobs(
    model: nn.Module,
    packed: Packed,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    checkpoint: bool = False,
) -> Logprobs:
    """Log-probability and entropy of every trained token under the model at this temperature, untruncated.

    `model` is a transformers causal LM or a peft model around one. `checkpoint` recomputes each layer's activations in
    the backward pass: a third slower, a fraction of the memory.
    """
    base = transformer(model)
    head = base.get_output_embeddings()
    rows = None if packed.images or base in _ONE_BY_ONE else fused_states(base, packed, checkpoint=checkpoint)
    if rows is None:
        hidden = hidden_states(model, packed, checkpoint=checkpoint)
        rows = hidden.index_select(0, torch.from_numpy(packed.rows).to(hidden.device))
    targets = torch.from_numpy(packed.targets).to(rows.device)
    scale, softcap = _logit_rules(base.config)
    logp, entropy = head_logprobs(head, rows, targets, temperature=temperature / scale, softcap=softcap, chunk=chunk)
    return Logprobs(logp, entropy, rows)


def hidden_states(model: nn.Module, packed: Packed, *, checkpoint: bool = False) -> Tensor:
    """[T, D] last hidden states of a packed row (also what a value head reads).

    An architecture that cannot be packed (recurrent layers, attention of its own) runs one episode at a time, with the
    same result; the log says so once.
    """
    base = transformer(model)
    weight = base.get_input_embeddings().weight
    if not packed.tokens:
        return cast(Tensor, weight.new_zeros((0, width(model))))
    if packed.images and reader_of(base) is None:
        raise ModelError("These episodes have images, and this model reads text alone.")
    if base not in _ONE_BY_ONE:
        try:
            with _checkpointing(base, checkpoint, partial(packed_attention, base.config)):
                return _packed_states(base, packed, weight.device)
        except NotPackable as why:
            _ONE_BY_ONE.add(base)
            _LOG.warning("%s: training runs one episode at a time", why.message)
    with _checkpointing(base, checkpoint, nullcontext):
        return _states_one_by_one(base, packed, weight.device)


def _packed_states(base: Any, packed: Packed, device: torch.device) -> Tensor:
    """The whole row at once. Raises NotPackable where a layer did not use the packed attention."""
    kinds = set(getattr(base.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise NotPackable(f"{type(base).__name__} has layers of the kind {sorted(kinds)[0]}")
    if reader_of(base) is not None:
        raise NotPackable(f"{type(base).__name__} reads images")
    ids = torch.from_numpy(packed.input_ids)[None].to(device)
    packing = Packing(packed.blocks)
    with packed_attention(base.config):
        out = _decoder(base)(
            input_ids=ids,
            position_ids=torch.from_numpy(packed.position_ids)[None].to(device),
            # four dimensions: taken as a finished mask and handed on, so that none is built
            attention_mask=ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
            use_cache=False,
            packing=packing,
        )
    if packing.calls != base.config.num_hidden_layers:
        raise NotPackable(
            f"{type(base).__name__} asked {packing.calls} times for {base.config.num_hidden_layers} layers"
        )
    return cast(Tensor, out.last_hidden_state[0])


def _states_one_by_one(base: Any, packed: Packed, device: torch.device) -> Tensor:
    """The same rows from one forward per episode; a shared prefix is read off the first."""
    ids, reader = torch.from_numpy(packed.input_ids).to(device), reader_of(base)
    parts: list[Tensor] = []
    images = iter(packed.images)
    for block in packed.blocks:
        prefix = block.own - block.start
        for number, (begin, end) in enumerate(block.segments or ((block.own, block.own),)):
            episode = torch.cat([ids[block.start : block.own], ids[begin:end]])
            seen: dict[str, Any] = {}
            if reader is not None:
                seen = reader.inputs(episode, next(images, ()) if end > begin else ())
                where = positions(base, episode, seen, reader.token)
                seen |= {} if where is None else {"position_ids": where}
            state = _decoder(base)(input_ids=episode[None], use_cache=False, **seen).last_hidden_state[0]
            parts.append(state[prefix if number else 0 :])
    return torch.cat(parts)


def trained_logprobs(
    model: nn.Module,
    groups: Sequence[Sequence[Segment]],
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    checkpoint: bool = False,
) -> tuple[Packed, Logprobs]:
    """`pack` and `logprobs` in one."""
    packed = pack(groups)
    return packed, logprobs(model, packed, temperature=temperature, chunk=chunk, checkpoint=checkpoint)


def width(model: nn.Module) -> int:
    """D: numbers in a hidden state."""
    return int(transformer(model).config.get_text_config().hidden_size)


def _decoder(base: Any) -> nn.Module:
    """The transformer without its head."""
    return cast(nn.Module, getattr(base, base.base_model_prefix))


def _logit_rules(config: Any) -> tuple[float, float | None]:
    """(factor on the logits, soft cap): what some families do between head and softmax."""
    factor = float(getattr(config, "logit_scale", None) or 1.0)
    factor /= float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return factor, None if cap is None else float(cap)


@contextmanager
def _checkpointing(base: Any, on: bool, attention: Callable[[], Any]) -> Iterator[None]:
    """Activation checkpointing per layer; the recomputation runs with the forward's `attention` too."""
    if not on or not torch.is_grad_enabled():
        yield
        return
    layers = [m for m in base.modules() if hasattr(m, "_can_checkpoint_with_cache")]  # transformers' layer class
    if not layers:
        raise ModelError(f"{type(base).__name__} has no layers that can be checkpointed.")
    before = [layer.training for layer in layers]
    recompute = partial(
        torch_checkpoint,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), attention()),
    )
    for layer in layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func, layer.training = True, recompute, True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = False, training
