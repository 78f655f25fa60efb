"""The training forward: log-probabilities of the trained tokens of a packed row.

Runs any transformers causal LM over the row, with attention restricted per episode (attention.py), and the head only at
positions that predict a trained token, in chunks (logprobs.py). The numbers and gradients are those of one episode at a
time. Transformers' own packing by position_ids leaks attention across episodes unless use_cache is False.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from agentrl_cli.errors import ModelError
from agentrl_cli.inference.attention import attention_in, make_change_error
from agentrl_cli.inference.cached_forward import CAUGHT, short_windows
from agentrl_cli.inference.kv_cache import NotServed
from agentrl_cli.inference.tolerance import TOLERANCE, difference
from agentrl_cli.learning.attention import NAME, NotPackable, Packing, packed_forward
from agentrl_cli.learning.fused_forward import fused_states
from agentrl_cli.learning.logprobs import head_logprobs, logit_logprobs
from agentrl_cli.learning.packing import Packed, Segment, pack
from agentrl_cli.learning.padded_forward import (
    decoder_of,
    padded_states,
    pictured_states,
    whole_logits,
)
from agentrl_cli.models.adapter import eval_mode, transformer
from agentrl_cli.models.vision import Reader, plain_logits, reader_of, trial

_LOG = logging.getLogger(__name__)
_WAYS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Models that were tried, and the way in which their episodes are computed."""
_AVOIDED: WeakKeyDictionary[Any, Mapping[str, str]] = WeakKeyDictionary()
"""Ways that are not taken with a model, and why."""


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
    """Log-probability and entropy of every trained token under the model at this temperature.

    Untruncated, or among the tokens that it was drawn from where the row has them (`Packed.support`).

    `model` is a transformers causal LM or a peft model around one. `checkpoint` recomputes each layer's activations in
    the backward pass: a third slower, a fraction of the memory.
    """
    base = transformer(model)
    if not packed.tokens:
        none = base.get_input_embeddings().weight.new_zeros((0, width(model)))
        return _head(base, none, packed, temperature, chunk)
    fused = None if packed.images else fused_states(base, packed, checkpoint=checkpoint)
    if fused is not None:
        return _head(base, fused, packed, temperature, chunk)
    try:
        way = way_of(base)
        if packed.images and reader_of(base) is None:
            raise ModelError("These episodes have images, and this model reads text alone.")
        return compute(way, base, packed, temperature, chunk, checkpoint)
    except (NotPackable, NotServed) as error:
        raise make_change_error(base) from error


def avoid(model: nn.Module, ways: Mapping[str, str]) -> None:
    """Do not compute a model's episodes in some ways; the reasons are logged if another way is taken for that."""
    _AVOIDED[transformer(model)] = ways


def way_of(base: Any) -> str:
    """Return how episodes of a model are computed; each way is compared with its plain forward the first time.

    `packed`: a row of all episodes; `padded`: side by side (recurrent layers, attention of its own); `whole`: padded,
    and the logits are the model's own, because its head is more than a linear layer; `images`: padded, with pixels;
    `apart`: those one by one.
    Raises ModelError if none of them gives the model's numbers.
    """
    if base not in _WAYS:
        windows = short_windows(base) if reader_of(base) is None else nullcontext()
        with eval_mode(base), windows:
            _WAYS[base] = _try_ways(base)
    return _WAYS[base]


@torch.no_grad()
def _try_ways(base: Any) -> str:
    """Return the first way whose log-probabilities are those of the plain forward, over prompts that cross every
    window, or after images.
    """
    weight, reader, problem, error = base.get_input_embeddings().weight, reader_of(base), "", ""
    name, tolerance = type(base).__name__, TOLERANCE.get(weight.dtype, 1e-3)
    ways = ("packed", "padded", "whole") if reader is None else ("images", "apart")
    padded = (
        "padded in training, not packed" if reader is None else "computed one by one in training"
    )
    try:
        groups, wanted = _text_trial(base) if reader is None else _image_trial(base, reader)
    except CAUGHT as raised:
        kind = "a text" if reader is None else "images"
        raise ModelError(
            f"{name} cannot compute {kind} by itself ({_describe(raised)})."
        ) from raised
    packed = pack(groups)
    for way in ways:
        try:
            if avoided := _AVOIDED.get(base, {}).get(way):
                raise ModelError(avoided)
            off = difference(compute(way, base, packed).logp.float(), wanted.float())
            error = "" if off <= tolerance else f"{name} {way} differs by {off:.2g} nats"
            if not error:
                _differentiate(base, way, packed)
        except (ModelError, *CAUGHT) as raised:
            error = _describe(raised)
        if not error:
            if problem:
                _LOG.warning("%s: episodes are %s", problem, padded)
            return way
        problem = problem or error
    raise ModelError(
        f"{name} cannot be trained: no way of computing several episodes gives its numbers ({error}).",
        hint="Choose another model; `agentrl doctor` names the engine of each.",
    )


def _describe(error: Exception) -> str:
    return error.message if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"


@torch.enable_grad()
def _differentiate(base: Any, way: str, packed: Packed) -> None:
    """Run a backward pass, for one parameter; some architectures have none in eval mode. Raises one of CAUGHT."""
    trained = next((p for p in base.parameters() if p.requires_grad), None)
    if trained is not None:
        logp = compute(way, base, packed).logp
        torch.autograd.grad(logp.sum(), trained, allow_unused=True)


def _text_trial(base: Any) -> tuple[list[list[Segment]], Tensor]:
    """Return a group that shares a prompt of 60 tokens and an episode of its own, and their plain log-probabilities.

    The prompt is shorter if the model has not as many positions: beyond them dynamic RoPE depends on what came before.
    """
    weight, rng = base.get_input_embeddings().weight, np.random.default_rng(0)
    most = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    room = most - 30 if isinstance(most, int) else 60
    prompt = rng.integers(0, len(weight), min(60, max(room, 2)))
    lengths = ((len(prompt), 9), (len(prompt), 30), (0, 25))
    found, wanted = [], []
    for shared, own in lengths:
        ids = np.concatenate([prompt[:shared], rng.integers(0, len(weight), own)])
        found.append(Segment(ids.astype(np.int32), np.arange(len(ids)) >= max(shared, 1)))
        given = torch.from_numpy(ids).to(weight.device)
        logits = base(input_ids=given[None], use_cache=False).logits[0, :-1]
        wanted.append(_pick_logprobs(logits, given)[max(shared, 1) - 1 :])
    return [found[:2], found[2:]], torch.cat(wanted)


def _image_trial(base: Any, reader: Reader) -> tuple[list[list[Segment]], Tensor]:
    """Return conversations with images whose last four tokens are trained, and their plain log-probabilities."""
    weight = base.get_input_embeddings().weight
    found, wanted = [], []
    for ids, images in trial(reader, len(weight), weight.device):
        trained = np.arange(len(ids)) >= len(ids) - 4
        found.append(Segment(ids.cpu().numpy().astype(np.int32), trained, images))
        wanted.append(_pick_logprobs(plain_logits(base, reader, ids, images)[:-1], ids)[-4:])
    return [found], torch.cat(wanted)


def _pick_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """[n - 1] log-probabilities of the tokens behind the first."""
    return logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def _head(
    base: Any, states: Tensor, packed: Packed, temperature: float, chunk: int | None
) -> Logprobs:
    """Log-probabilities from the states [M, D] that predict the trained tokens."""
    targets = torch.from_numpy(packed.targets).to(states.device)
    scale, softcap = logit_rules(base.config)
    head = base.get_output_embeddings()
    logp, entropy = head_logprobs(
        head,
        states,
        targets,
        temperature=temperature / scale,
        softcap=softcap,
        chunk=chunk,
        support=packed.support,
    )
    return Logprobs(logp, entropy, states)


def compute(
    way: str,
    base: Any,
    packed: Packed,
    temperature: float = 1.0,
    chunk: int | None = None,
    checkpoint: bool = False,
) -> Logprobs:
    """Return `logprobs` of a transformers model in one of the ways of `way_of`."""
    packs = partial(attention_in, base.config, NAME, packed_forward)
    with _checkpointing(base, checkpoint, packs if way == "packed" else nullcontext):
        if way == "whole":
            logits, states = whole_logits(base, packed)
            precise = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
            targets = torch.from_numpy(packed.targets).to(precise.device)
            return Logprobs(*logit_logprobs(precise, targets, packed.support), states)
        if way == "packed":
            hidden = _packed_states(base, packed)
        elif way == "padded":
            hidden = padded_states(base, packed, share=not checkpoint)
        else:
            hidden = pictured_states(base, packed, apart=way == "apart")
    rows = torch.from_numpy(packed.rows).to(hidden.device)
    return _head(base, hidden.index_select(0, rows), packed, temperature, chunk)


def _packed_states(base: Any, packed: Packed) -> Tensor:
    """Return the whole row at once. Raises NotPackable if a layer did not use the packed attention."""
    kinds = set(getattr(base.config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds:
        raise NotPackable(f"{type(base).__name__} has layers of the kind {sorted(kinds)[0]}")
    device = base.get_input_embeddings().weight.device
    ids = torch.from_numpy(packed.input_ids)[None].to(device)
    packing = Packing(packed.blocks)
    with attention_in(base.config, NAME, packed_forward):
        out = decoder_of(base)(
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
    return packed, logprobs(
        model, packed, temperature=temperature, chunk=chunk, checkpoint=checkpoint
    )


def width(model: nn.Module) -> int:
    """D: numbers in a hidden state."""
    return int(transformer(model).config.get_text_config().hidden_size)


def logit_rules(config: Any) -> tuple[float, float | None]:
    """Return (factor on the logits, soft cap), which some families apply between head and softmax."""
    config = config.get_text_config()
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
    # transformers' layer class
    layers = [m for m in base.modules() if hasattr(m, "_can_checkpoint_with_cache")]
    if not layers:
        raise ModelError(f"{type(base).__name__} has no layers that can be checkpointed.")
    before = [layer.training for layer in layers]
    recompute = partial(
        torch_checkpoint,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), attention()),
    )
    for layer in layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func, layer.training = (
            True,
            recompute,
            True,
        )
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = False, training
