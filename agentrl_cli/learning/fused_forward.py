"""A fused training forward for a packed row: Llama, Mistral, Qwen2 and Qwen3 under a LoRA adapter.

It runs the layers of fused_layer.py over the model's own weights (no copy is made), and the last layer's
feed-forward part only at the positions that are asked for. Whether a model is run this way is decided by its structure
and by comparing numbers with its own forward once; every other model, and full weights, take transformers' forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from agentrl_cli.inference.tolerance import RELATIVE, relative_difference
from agentrl_cli.learning.attention import Block, Packing, packed_forward
from agentrl_cli.learning.fused_layer import After, Before, Heads, Projection
from agentrl_cli.learning.packing import Packed
from agentrl_cli.models.adapter import eval_mode, lora_parts
from agentrl_cli.registry.plugins import offers

_LOG = logging.getLogger(__name__)
_TRUSTED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Models whose numbers were compared, and whether they agreed."""
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", *offers("imports")}
"""`model_type` of the architectures whose decoder layers are this block."""


def fused_states(base: Any, packed: Packed, *, checkpoint: bool) -> Tensor | None:
    """[M, D] the hidden states that predict the trained tokens; None if this model is not run this way."""
    if not packed.tokens or not _structure(base):
        return None
    if base not in _TRUSTED:
        _TRUSTED[base] = _agrees(base)
    if not _TRUSTED[base]:
        return None
    device = base.get_input_embeddings().weight.device
    wanted, place = np.unique(
        packed.rows, return_inverse=True
    )  # a shared prefix predicts for several episodes
    given = (packed.input_ids, packed.position_ids, wanted)
    ids, positions, reads = (torch.from_numpy(array).to(device) for array in given)
    states = _run(base, ids, positions, reads, packed.blocks, checkpoint)
    in_order = np.array_equal(place, np.arange(len(wanted)))
    return states if in_order else states.index_select(0, torch.from_numpy(place).to(device))


def _structure(base: Any) -> bool:
    """Whether it is this block with only plain LoRA matrices trained, without dropout; looked at before every use."""
    config, embedding = base.config, base.get_input_embeddings()
    if (
        getattr(config, "model_type", "") not in FAMILIES
        or getattr(config, "hidden_act", "silu") not in ("silu", "swish")
        or type(embedding) is not nn.Embedding
        or (getattr(config, "attention_dropout", None) and base.training)
    ):
        return False
    named = list(base.named_parameters())
    if any(weight.requires_grad and ".lora_" not in name for name, weight in named):
        return False
    if len({weight.device for _, weight in named}) > 1:
        return False
    # a hook would be passed by
    if any(module._forward_hooks or module._forward_pre_hooks for module in base.modules()):
        return False
    try:
        layers = list(base.model.layers)
        linears = [module for one in layers for module in _linears(one)]
        norms = [base.model.norm, *(one.input_layernorm for one in layers)]
    except AttributeError:
        return False
    rms = all(hasattr(norm, "variance_epsilon") for norm in norms)
    return (
        rms and all(map(_plain, linears)) and lora_parts(base.get_output_embeddings()) is not None
    )


def _plain(module: Any) -> bool:
    """Whether a module is a linear layer with at most one adapter, which drops nothing."""
    parts = lora_parts(module)
    names = [] if parts is None else parts[1]
    dropout = module.lora_dropout[names[0]] if names else None
    drops = dropout is not None and not isinstance(dropout, nn.Identity) and dropout.training
    return parts is not None and len(names) < 2 and not drops


def _linears(layer: Any) -> Iterator[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _read(module: Any) -> tuple[Projection, tuple[Tensor | None, Tensor | None]]:
    """Return a linear layer and its active adapter."""
    parts = lora_parts(module)
    assert parts is not None  # by _structure
    inner, names = parts
    if not names:
        return Projection(inner.weight, inner.bias, 0.0), (None, None)
    name = names[0]
    pair = (module.lora_A[name].weight, module.lora_B[name].weight)
    return Projection(inner.weight, inner.bias, float(module.scaling[name])), pair


def _run(
    base: Any,
    ids: Tensor,
    positions: Tensor,
    wanted: Tensor,
    blocks: tuple[Block, ...],
    checkpoint: bool,
) -> Tensor:
    """[M, D] states at the `wanted` positions of a row of tokens, ids and positions [T]."""
    decoder = base.model
    x = decoder.embed_tokens(ids)
    cos, sin = (part[0][:, None] for part in decoder.rotary_emb(x[None], positions[None]))
    last = len(decoder.layers) - 1
    again = checkpoint and torch.is_grad_enabled()
    for number, layer in enumerate(decoder.layers):
        given = (layer, x, cos, sin, blocks, wanted if number == last else None)
        x = torch_checkpoint(_layer, *given, use_reentrant=False) if again else _layer(*given)
    states: Tensor = decoder.norm(x)
    return states


def _layer(
    layer: Any,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    blocks: tuple[Block, ...],
    wanted: Tensor | None,
) -> Tensor:
    attention = layer.self_attn
    read = [_read(module) for module in _linears(layer)]
    given, adapters = [one for one, _ in read], [each for _, pair in read for each in pair]
    norm = layer.input_layernorm
    dim = int(attention.head_dim)
    q_norm, k_norm = (
        getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")
    )
    heads = Heads(
        given[0].weight.shape[0] // dim,
        given[1].weight.shape[0] // dim,
        dim,
        norm.variance_epsilon,
        q_norm,
        k_norm,
    )
    q, k, v = Before.apply(x, norm.weight, cos, sin, heads, given[:3], *adapters[:6])  # type: ignore[no-untyped-call]
    window = getattr(attention, "sliding_window", None)
    if attention.config.model_type == "mistral":
        window = attention.config.sliding_window
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    out, _ = packed_forward(
        attention,
        q,
        k,
        v,
        None,
        scaling=attention.scaling,
        sliding_window=window,
        packing=Packing(blocks),
    )
    attended = out[0].flatten(1)
    if wanted is not None:
        attended, x = attended.index_select(0, wanted), x.index_select(0, wanted)
    norm = layer.post_attention_layernorm
    after: Any = After.apply
    done: Tensor = after(x, attended, norm.weight, norm.variance_epsilon, given[3:], *adapters[6:])
    return done


@torch.no_grad()
def _agrees(base: Any) -> bool:
    """Compare a short row with the model's own forward."""
    weight = base.get_input_embeddings().weight
    ids = torch.randint(0, weight.shape[0], (24,), generator=torch.Generator().manual_seed(0)).to(
        weight.device
    )
    places = torch.arange(24, device=weight.device)
    try:
        with eval_mode(base):
            own = base.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            ours = _run(base, ids, places, places, (Block(0, 0, (24,)),), False)
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        _LOG.debug("the fused training forward does not fit %s: %s", type(base).__name__, error)
        return False
    off = relative_difference(ours, own)
    if not off <= RELATIVE.get(weight.dtype, 1e-3):
        _LOG.warning(
            "%s: the fused training forward differs by %.2g: not used", type(base).__name__, off
        )
        return False
    return True
