"""A decoder of ours for the block that Llama, Mistral, Qwen2 and Qwen3 share, over weights laid out for sampling.

It computes what the model's own forward computes, with a fraction of its Python and kernel calls: queries, keys and
values in one product, residuals and the gate's activation inside the products, weights prepacked for the CPU's matrix
kernels (oneDNN's reordering), adapters merged. Those weights are a copy, taken by `refresh`: until the next one an
optimizer may change the model's own while episodes are sampled from these.

Whether it may be used is decided by `fusable` (structure) and by the engine's comparison with the model itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from agentrl_cli.policies.local_attention import NotServed, Seen
from agentrl_cli.policies.local_kernel import WIDEST, Ragged, why_not

FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "minimind"}
"""`model_type` of the architectures whose decoder layers are this block."""
STATIC = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose angles depend on the position alone: they are kept in a table."""


class Product:
    """y = act(x Wᵀ + b), then times or plus another tensor; prepacked on the CPU in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, packed: bool) -> None:
        self.bias = bias
        self.packed = packed
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64) if packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, K] -> [N, M]"""
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
            return out
        return silu(linear(x, self.weight, self.bias))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, "mul") if self.packed else linear(x, self.weight, self.bias).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, "add") if self.packed else linear(x, self.weight, self.bias).add_(other)

    def _binary(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, how)
        return out


@dataclass(slots=True)
class Block:
    """One layer's weights."""

    norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Product
    mlp_norm: Tensor
    gate: Product
    up: Product
    down: Product
    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None


class Fused:
    """The engine `fused`. Raises NotServed where the model is not of this block."""

    name = "fused"
    copies = True

    def __init__(self, model: nn.Module) -> None:
        self.why, self.shares = "", 0
        self._base = transformer(model)
        why = fusable(self._base)
        if why:
            raise NotServed(why)
        self._blocks: list[Block] = []
        self._angles: tuple[Tensor, Tensor] | None = None
        """cos and sin [positions, dim] of the positions that were needed so far."""
        self.refresh()
        dim = self._blocks[0].dim
        fits = self._static and self._table(1)[0].shape[-1] == dim <= WIDEST and self._blocks[0].qkv.packed
        self.why = why_not() if fits else ""
        self.packs = fits and not self.why

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's weights as they are now, adapters merged. No optimizer may be at work meanwhile."""
        decoder = self._base.model
        embedding, head = decoder.embed_tokens.weight, self._base.get_output_embeddings()
        packed = embedding.device.type == "cpu" and embedding.dtype == torch.float32 and has_kernels()
        # Under an adapter the embedding never changes: it is read where it is.
        self._embedding = embedding.detach().clone() if embedding.requires_grad else embedding.detach()
        self._norm, self._eps = _own(decoder.norm.weight, embedding.dtype), float(decoder.norm.variance_epsilon)
        self._head = _product([head], packed)
        self._rotary = copy.deepcopy(decoder.rotary_emb)  # some kinds change their buffers in a forward
        self._static, self._angles = getattr(decoder.rotary_emb, "rope_type", "") in STATIC, None
        self._blocks.clear()  # before the new ones: two copies of the weights, not three
        self._blocks.extend(_block(layer, packed) for layer in decoder.layers)

    def __call__(self, ids: Tensor, rows: Seen, *, head: bool) -> Tensor | None:
        """ids [B, T] -> logits of the last position [B, vocabulary], or None where only the cache is wanted."""
        batch, width = ids.shape
        x = torch.nn.functional.embedding(ids.reshape(-1), self._embedding)
        cos, sin = self._rotary(x[None], rows.positions)  # [B, T, d]
        cos, sin = cos[:, :, None], sin[:, :, None].clone()
        sin[..., : sin.shape[-1] // 2].neg_()  # rotate_half's sign, so that a roll is enough
        last = len(self._blocks) - 1
        for number, block in enumerate(self._blocks):
            attended = self._attention(number, block, x, cos, sin, rows, batch, width)
            if number == last and head and width > 1:
                attended, x = (t.view(batch, width, -1)[:, -1].contiguous() for t in (attended, x))
            x = block.out.plus(attended, x)
            if number == last and not head:
                return None
            h = rms_norm(x, block.mlp_norm.shape, block.mlp_norm, self._eps)
            x = block.down.plus(block.up.times(h, block.gate.silu(h)), x)
        return self._head(rms_norm(x, self._norm.shape, self._norm, self._eps))

    def packed(self, ids: Tensor, view: Ragged) -> Tensor:
        """ids [tokens], any number for each row -> logits after each row's last one [rows, vocabulary]."""
        x = torch.nn.functional.embedding(ids, self._embedding)
        cos, sin = self._table(int(view.plan.longest))
        last = len(self._blocks) - 1
        for number, block in enumerate(self._blocks):
            mixed = block.qkv(rms_norm(x, block.norm.shape, block.norm, self._eps)).view(len(x), -1, block.dim)
            attended = view.attend(
                number,
                mixed,
                cos,
                sin,
                heads=block.heads,
                kv_heads=block.kv_heads,
                scale=block.scale,
                window=block.window,
                norms=(block.q_norm, block.k_norm),
                eps=self._eps,
            )
            if number == last and view.last is not None:
                attended, x = attended[view.last], x[view.last]
            x = block.out.plus(attended, x)
            h = rms_norm(x, block.mlp_norm.shape, block.mlp_norm, self._eps)
            x = block.down.plus(block.up.times(h, block.gate.silu(h)), x)
        return self._head(rms_norm(x, self._norm.shape, self._norm, self._eps))

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [at least `length`, dim] of positions from 0 on."""
        if self._angles is None or len(self._angles[0]) < length:
            positions = torch.arange(max(256, 1 << (length - 1).bit_length()), device=self._embedding.device)
            cos, sin = self._rotary(self._embedding[None, :1], positions[None])
            self._angles = cos[0].contiguous(), sin[0].contiguous()
        return self._angles

    def _attention(
        self, number: int, block: Block, x: Tensor, cos: Tensor, sin: Tensor, rows: Seen, batch: int, width: int
    ) -> Tensor:
        h = rms_norm(x, block.norm.shape, block.norm, self._eps)
        both = block.heads + block.kv_heads
        mixed = block.qkv(h).view(batch, width, both + block.kv_heads, block.dim)
        turned, value = mixed[:, :, :both], mixed[:, :, both:]
        if block.q_norm is not None and block.k_norm is not None:
            q = rms_norm(turned[:, :, : block.heads], block.q_norm.shape, block.q_norm, self._eps)
            k = rms_norm(turned[:, :, block.heads :], block.k_norm.shape, block.k_norm, self._eps)
            turned = torch.cat([q, k], 2)
        turned = torch.addcmul(turned * cos, turned.roll(block.dim // 2, -1), sin).transpose(1, 2)
        query, key = turned[:, : block.heads], turned[:, block.heads :]
        key, value = rows.update(key, value.transpose(1, 2), number)
        out = rows.attend(query, key, value, scale=block.scale, window=block.window)
        return out.transpose(1, 2).reshape(batch * width, -1)


def transformer(model: nn.Module) -> Any:
    """The transformers model inside a peft model, or the model itself."""
    inner: Callable[[], Any] | None = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def fusable(base: Any) -> str:
    """Why a transformers model cannot be run by `Fused`; empty where it can, as far as its structure tells."""
    config = base.config
    if getattr(config, "model_type", "") not in FAMILIES:
        return f"{type(base).__name__} is no Llama, Mistral, Qwen2 or Qwen3"
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    if any(module._forward_hooks or module._forward_pre_hooks for module in base.modules()):
        return "a module has a forward hook, which would be passed by"
    if len({weight.device for weight in base.parameters()}) > 1:
        return "its weights are on several devices"
    try:
        layers = list(base.model.layers)
        modules = [m for one in layers for m in (*_projections(one.self_attn), *_mlp(one.mlp))]
        modules.append(base.get_output_embeddings())
        norms = [base.model.norm, *(one.input_layernorm for one in layers)]
    except AttributeError as error:
        return str(error)
    if any(not hasattr(norm, "variance_epsilon") for norm in norms):
        return "its norms are no RMSNorm"
    return next((why for why in map(_not_linear, modules) if why), "")


def _projections(attention: Any) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]


def _mlp(mlp: Any) -> list[Any]:
    return [mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _not_linear(module: Any) -> str:
    """Why a module is no linear layer, or LoRA on one, that can be copied; empty where it is."""
    inner = getattr(module, "base_layer", module)
    if type(inner) is not nn.Linear:
        return f"{type(inner).__name__} is no plain linear layer"
    if inner is module:
        return ""
    if not hasattr(module, "get_delta_weight") or not hasattr(module, "active_adapters"):
        return f"{type(module).__name__} cannot be merged"
    variants = getattr(module, "lora_variant", None)
    if variants or any(getattr(module, "lora_bias", {}).values()):
        return "its adapter is more than two matrices"
    return ""


def _weight(module: Any) -> Tensor:
    """A linear layer's weight, its active adapters merged."""
    inner = getattr(module, "base_layer", module)
    weight: Tensor = inner.weight.detach()
    if inner is module or module.merged or module.disable_adapters:
        return weight
    for name in module.active_adapters:
        if name in module.lora_A:
            weight = weight + module.get_delta_weight(name).detach().to(weight.dtype)
    return weight


def _bias(module: Any) -> Tensor | None:
    bias: Tensor | None = getattr(module, "base_layer", module).bias
    return None if bias is None else bias.detach()


def _product(modules: list[Any], packed: bool) -> Product:
    """One product for one or several layers of the same input, over copies of their weights."""
    weights, biases = [_weight(m) for m in modules], [_bias(m) for m in modules]
    weight = weights[0].clone() if len(weights) == 1 else torch.cat(weights)
    if all(bias is None for bias in biases):
        return Product(weight, None, packed)
    given = [weight.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return Product(weight, torch.cat(given), packed)


def _own(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, in the dtype of what it weighs: compiled code reads no other."""
    return weight.detach().to(dtype, copy=True)


def _block(layer: Any, packed: bool) -> Block:
    attention = layer.self_attn
    dim = int(attention.head_dim)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    window = getattr(attention, "sliding_window", None)
    if attention.config.model_type == "mistral":
        window = attention.config.sliding_window
    q, k, v, o = _projections(attention)
    dtype = getattr(o, "base_layer", o).weight.dtype
    gate, up, down = (_product([module], packed) for module in _mlp(layer.mlp))
    return Block(
        norm=_own(layer.input_layernorm.weight, dtype),
        qkv=_product([q, k, v], packed),
        q_norm=None if norms[0] is None else _own(norms[0].weight, dtype),
        k_norm=None if norms[1] is None else _own(norms[1].weight, dtype),
        out=_product([o], packed),
        mlp_norm=_own(layer.post_attention_layernorm.weight, dtype),
        gate=gate,
        up=up,
        down=down,
        heads=q.out_features // dim,
        kv_heads=k.out_features // dim,
        dim=dim,
        scale=float(attention.scaling),
        window=window,
    )


@cache
def has_kernels() -> bool:
    """Whether this torch has the prepacked products (oneDNN)."""
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
