"""A fused training forward for a packed row: Llama, Mistral, Qwen2 and Qwen3 under a LoRA adapter.

It runs the layers of fused_layer.py over the model's own weights (no copy is made), and the last layer's
feed-forward part only at the positions that are asked for. Whether a model is run this way is decided by its structure
and by comparing numbers with its own forward once; every other model, and full weights, take transformers' forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from agentrl_cli.learning.attention import Block, Packing, packed_forward
from agentrl_cli.learning.fused_layer import After, Before, Heads, Projection
from agentrl_cli.learning.packing import Packed
from agentrl_cli.registry.plugins import offers

_LOG = logging.getLogger(__name__)
_TRUSTED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Models whose numbers were compared, and whether they agreed."""
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", *offers("imports")}
"""`model_type` of the architectures whose decoder layers are this block."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Most that a hidden state may differ from the model's own, relative to the largest."""


@dataclass(frozen=True, slots=True)
class Row:
    """The inputs of a forward: ids [T], positions [T], the blocks, and the positions whose states are wanted [M]."""

    ids: Tensor
    positions: Tensor
    blocks: tuple[Block, ...]
    wanted: Tensor


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
    states = _run(base, Row(ids, positions, packed.blocks, reads), checkpoint)
    in_order = np.array_equal(place, np.arange(len(wanted)))
    return states if in_order else states.index_select(0, torch.from_numpy(place).to(device))


def _structure(base: Any) -> bool:
    """Whether only plain LoRA matrices are trained, on linear layers, without dropout; looked at before every use."""
    if (
        next(
            (p for name, p in base.named_parameters() if p.requires_grad and ".lora_" not in name),
            None,
        )
        is not None
    ):
        return False
    if fusable(base) or type(base.get_input_embeddings()) is not nn.Embedding:
        return False
    config = base.config
    if getattr(config, "attention_dropout", 0.0) and base.training:
        return False
    adapted = [
        m for layer in base.model.layers for m in _linears(layer) if hasattr(m, "base_layer")
    ]
    return all(_plain(m) for m in adapted)


def _plain(module: Any) -> bool:
    names = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or not names:
        return True
    dropout = module.lora_dropout[names[0]]
    return len(names) == 1 and (isinstance(dropout, nn.Identity) or not dropout.training)


def _linears(layer: Any) -> Iterator[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _read(module: Any) -> tuple[Projection, tuple[Tensor | None, Tensor | None]]:
    """Return a linear layer and its active adapter."""
    inner = getattr(module, "base_layer", module)
    names = (
        []
        if inner is module
        else [name for name in module.active_adapters if name in module.lora_A]
    )
    if not names or module.disable_adapters or module.merged:
        return Projection(inner.weight, inner.bias, 0.0), (None, None)
    name = names[0]
    pair = (module.lora_A[name].weight, module.lora_B[name].weight)
    return Projection(inner.weight, inner.bias, float(module.scaling[name])), pair


def _run(base: Any, row: Row, checkpoint: bool) -> Tensor:
    decoder = base.model
    x = decoder.embed_tokens(row.ids)
    cos, sin = (part[0][:, None] for part in decoder.rotary_emb(x[None], row.positions[None]))
    last = len(decoder.layers) - 1
    again = checkpoint and torch.is_grad_enabled()
    for number, layer in enumerate(decoder.layers):
        given = (layer, x, cos, sin, row.blocks, row.wanted if number == last else None)
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
    training = base.training
    base.eval()
    try:
        own = base.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        ours = _run(base, Row(ids, places, (Block(0, 0, (24,)),), places), False)
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        _LOG.debug("the fused training forward does not fit %s: %s", type(base).__name__, error)
        return False
    finally:
        base.train(training)
    off = float((ours.float() - own.float()).abs().max() / own.float().abs().max().clamp(min=1e-6))
    if not off <= TOLERANCE.get(weight.dtype, 1e-3):
        _LOG.warning(
            "%s: the fused training forward differs by %.2g: not used", type(base).__name__, off
        )
        return False
    return True


def fusable(base: Any) -> str:
    """Return why a transformers model cannot be trained by this forward, judging by its structure; "" if it can."""
    config = base.config
    if getattr(config, "model_type", "") not in FAMILIES:
        return f"{type(base).__name__} is not a Llama, Mistral, Qwen2 or Qwen3"
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    if any(module._forward_hooks or module._forward_pre_hooks for module in base.modules()):
        return "a module has a forward hook, which would be passed by"
    if len({weight.device for weight in base.parameters()}) > 1:
        return "its weights are on several devices"
    try:
        layers = list(base.model.layers)
        modules = [module for one in layers for module in _linears(one)]
        modules.append(base.get_output_embeddings())
        norms = [base.model.norm, *(one.input_layernorm for one in layers)]
    except AttributeError as error:
        return str(error)
    if any(not hasattr(norm, "variance_epsilon") for norm in norms):
        return "its norms are not RMSNorm"
    return next((why for why in map(_not_linear, modules) if why), "")


def _not_linear(module: Any) -> str:
    """Return why a module is not a plain linear layer, or LoRA on one; "" if it is."""
    inner = getattr(module, "base_layer", module)
    if type(inner) is not nn.Linear:
        return f"{type(inner).__name__} is not a plain linear layer"
    if inner is module:
        return ""
    if not hasattr(module, "get_delta_weight") or not hasattr(module, "active_adapters"):
        return f"{type(module).__name__} cannot be merged"
    variants = getattr(module, "lora_variant", None)
    if variants or any(getattr(module, "lora_bias", {}).values()):
        return "its adapter is more than two matrices"
    return ""
