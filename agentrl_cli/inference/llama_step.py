"""The forward of a Llama-shaped decoder in plain tensor operations: Llama, Mistral, Qwen 2 and 3, Granite, SmolLM.

Queries, keys and values are one product, and so are the two halves of the feed-forward part. A step of few rows in a
small model takes as long as its operations are many, and a module of transformers makes many. The runner compares the
numbers with the model's own when it is made; another model, or one whose modules were changed, runs by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import embedding, rms_norm, silu

from agentrl_cli.inference.attention import View
from agentrl_cli.inference.sampling_weights import Modules, SamplingWeights

FAMILIES = {"granite", "llama", "mistral", "qwen2", "qwen3", "smollm3"}
"""`model_type` of the architectures that are this decoder, SmolLM and SmolLM 2 being Llamas."""


class LlamaStep:
    """Runs rows of tokens through the layers of a transformers model for which `is_llama` holds."""

    def __init__(self, base: Any, *, fixed: bool = False) -> None:
        config = base.config  # reading it takes long: once
        self._base, self._config = base, config if config.model_type == "mistral" else None
        self._in, self._out, self._residual = (
            float(getattr(config, name, 1.0))
            for name in ("embedding_multiplier", "logits_scaling", "residual_multiplier")
        )
        self._dim = int(base.model.layers[0].self_attn.head_dim)
        self._groups = [_groups(layer) for layer in base.model.layers]
        self._head: Modules = (base.get_output_embeddings(),)
        every = [group for groups in self._groups for group in groups]
        self.weights = SamplingWeights([*every, self._head], fixed=fixed)

    def run(self, ids: Tensor, view: View, *, logits: bool) -> Tensor | None:
        """Feed ids [B, T]: logits of the last position [B, vocabulary]; None if only keys and values are wanted."""
        decoder = self._base.model
        x = embedding(ids.reshape(-1), decoder.embed_tokens.weight)
        x = x if self._in == 1.0 else x * self._in
        cos, sin = decoder.rotary_emb(x, view.positions)
        half = self._dim // 2
        # x·cos + rotate_half(x)·sin, where rotating is a roll and the sign is the sine's
        turn = (
            cos.reshape(-1, 1, self._dim),
            torch.cat([-sin[..., :half], sin[..., half:]], -1).view(-1, 1, self._dim),
        )
        last = len(self._groups) - 1
        for number, layer in enumerate(decoder.layers):
            found = self._layer(
                number, layer, x, turn, view, only_cache=number == last and not logits
            )
            if found is None:
                return None
            x = found
        x = x.view(*ids.shape, -1)[:, -1]
        x = self.weights.product(self._head)(_norm(x, decoder.norm))
        return x if self._out == 1.0 else x / self._out

    def _layer(
        self,
        number: int,
        layer: Any,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        view: View,
        *,
        only_cache: bool,
    ) -> Tensor | None:
        """Return the rows [n, hidden] after a layer; None if only its keys and values are wanted."""
        attention, dim = layer.self_attn, self._dim
        join, out, widen, down = map(self.weights.product, self._groups[number])
        joined = join(_norm(x, layer.input_layernorm)).view(len(x), -1, dim)
        batch, width = view.positions.shape
        heads, keys = (one.out_features // dim for one in (attention.q_proj, attention.k_proj))
        # Queries and keys together: half as many operations.
        both, v = torch.split(joined, [heads + keys, keys], 1)
        if hasattr(attention, "q_norm"):  # Qwen 3: each head normed
            own = (
                attention.q_norm.weight.expand(heads, -1),
                attention.k_norm.weight.expand(keys, -1),
            )
            both = _norm(both, attention.q_norm, torch.cat(own))
        if getattr(attention, "use_rope", 1):
            both = torch.addcmul(both * turn[0], both.roll(dim // 2, -1), turn[1])
        q, k = torch.split(both, [heads, keys], 1)
        q, k, v = (each.view(batch, width, -1, dim).transpose(1, 2) for each in (q, k, v))
        view.update(k, v, number)
        if only_cache:
            return None
        holder = attention if self._config is None else self._config
        window = getattr(holder, "sliding_window", None)
        mixed = view.attend(q, k, v, scale=attention.scaling, window=window)
        x = torch.add(x, out(mixed.transpose(1, 2).reshape(len(x), -1)), alpha=self._residual)
        gate, up = widen(_norm(x, layer.post_attention_layernorm)).chunk(2, -1)
        return torch.add(x, down(silu(gate).mul_(up)), alpha=self._residual)


def _norm(x: Tensor, norm: Any, weight: Tensor | None = None) -> Tensor:
    """Return rows over the root of their mean square, times the module's weight, or `weight` of the shape of a row.

    On a CPU torch makes it of more and larger operations than these.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        if weight is None:
            return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
        return rms_norm(x, x.shape[-1:], None, norm.variance_epsilon) * weight
    length = vector_norm(x, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return torch.mul(x, scale).mul_(norm.weight if weight is None else weight)


def _groups(layer: Any) -> tuple[Modules, Modules, Modules, Modules]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def is_llama(base: Any) -> bool:
    """Whether a transformers model is run by LlamaStep, subject to its numbers: its structure is this decoder's."""
    config = base.config
    return (
        getattr(config, "model_type", "") in FAMILIES
        and getattr(config, "hidden_act", "silu") in ("silu", "swish")
        and type(base).__module__.startswith("transformers.models.")
        and type(base.get_input_embeddings()) is nn.Embedding
        and not any(
            module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
            for module in base.modules()
        )
    )
