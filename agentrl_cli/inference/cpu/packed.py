"""A copy of a model for sampling: weights laid out for products with few rows, adapters merged, norms in one operation.

A decode step multiplies few rows by every weight of the model. On a CPU the matrix library then spends its time on
bringing weights into its own order; here they lie in that order from the start. The copy's forward is the model's own,
with other modules in it. Frozen weights that are not packed are shared with the model; trained ones are copies, so an
optimizer may change the model while its copy samples.

Large layers are packed for oneDNN, by operators of torch that are not public; small ones, and all of them where those
operators are missing, are transposed. Where the copy's numbers are not the model's, the model itself is run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from agentrl_cli.inference.kv_cache import NotServed
from agentrl_cli.inference.memory import copies_weights
from agentrl_cli.inference.model_runner import ModelRunner, check_structure
from agentrl_cli.models.adapter import transformer
from agentrl_cli.models.device import free_memory


class PackedRunner(ModelRunner):
    """Runs a packed copy of a model. Raises NotServed where there is to be none."""

    copies = True
    packs_from = 2**20
    """Bytes of a layer's weights from which they are packed for oneDNN."""

    def __init__(self, model: Any) -> None:
        base = transformer(model)
        check_structure(model)
        weights = base.get_input_embeddings().weight
        size = sum(w.numel() * w.element_size() for w in base.parameters())
        if weights.dtype != torch.float32 or not copies_weights(size, weights.device, free_memory(weights.device)):
            raise NotServed("its weights are not copied: they are no float32 on a CPU, or memory is short")
        linears = dict(_linears(base))
        inner = [getattr(given, "base_layer", given) for given in linears.values()]
        packed = {id(one.weight) for one in inner}
        packed -= {id(w) for one in base.modules() if one not in inner for w in one.parameters(recurse=False)}  # tied
        shared = [w for w in base.parameters() if not w.requires_grad or id(w) in packed]
        copied = copy.deepcopy(base, {id(w): w for w in shared}).eval()
        self._base, self._packed = base, [(given, PackedLinear(given, self.packs_from)) for given in linears.values()]
        for name, (_, layer) in zip(linears, self._packed, strict=True):
            _replace(copied, name, layer)
        for name, norm in [(name, norm) for name, norm in base.named_modules() if _is_norm(norm)]:
            _replace(copied, name, OneNorm(norm))
        super().__init__(copied)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights of the model as they are now. No optimizer may be at work meanwhile."""
        for given, packed in self._packed:
            packed.pack(given)
        ours = dict(self.model.named_parameters())
        for name, weights in self._base.named_parameters():
            if name in ours and ours[name] is not weights:
                ours[name].copy_(weights)


class PackedLinear(nn.Module):
    """y = x Wᵀ + b over weights [out, in] in another order; a LoRA layer's active adapters are merged."""

    def __init__(self, given: Any, packs_from: int) -> None:
        super().__init__()
        weight = getattr(given, "base_layer", given).weight
        self._onednn = has_kernels() and weight.numel() * weight.element_size() >= packs_from
        self.pack(given)

    @torch.no_grad()
    def pack(self, given: Any) -> None:
        """Pack the weights of a linear layer, or of a LoRA layer over one."""
        inner = getattr(given, "base_layer", given)
        weight = inner.weight
        if inner is not given and not given.merged and not given.disable_adapters:
            for name in given.active_adapters:
                if name in given.lora_A:
                    weight = weight + given.get_delta_weight(name).to(weight.dtype)
        weight = weight.detach()
        packs = torch.ops.mkldnn._reorder_linear_weight if self._onednn else None
        self._weight = weight.t().contiguous() if packs is None else packs(weight.contiguous(), 64)
        self.bias = None if inner.bias is None else inner.bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        if not self._onednn:
            return linear(x, self._weight.t(), self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


class OneNorm(nn.Module):
    """RMSNorm in one operation."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(given.weight.detach().clone(), requires_grad=False)
        self.variance_epsilon = given.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def has_kernels() -> bool:
    """Whether this torch packs weights for oneDNN."""
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _linears(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """Linear layers, and plain LoRA layers over them, by name."""
    wrapped = ""
    for name, module in base.named_modules():
        if wrapped and name.startswith(wrapped):
            continue
        inner = getattr(module, "base_layer", module)
        plain = inner is module or (
            hasattr(module, "get_delta_weight")
            and not getattr(module, "lora_variant", None)
            and not any(getattr(module, "lora_bias", {}).values())
        )
        if type(inner) is nn.Linear and plain:
            wrapped = f"{name}." if inner is not module else ""
            yield name, module


def _is_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _replace(base: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(base.get_submodule(parent), last, module)
