"""The linear layers of a model as sampling multiplies with them: copies, each in the fastest way for its shape.

Layers that read the same rows are one matrix, an adapter is added to its layer's own weights (in float32 alone: in 16
bits a sum would round the adapter away), and each matrix lies as its fastest way here wants it (products.py).
The model itself stays as it is. Where the copies would take too much memory, and for layers that are more than a
matrix, the modules are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agentrl_cli.inference.memory import copies_weights
from agentrl_cli.inference.products import WAYS, Product, fastest_way
from agentrl_cli.models.adapter import lora_parts

Modules = tuple[Any, ...]
"""Linear layers, of torch's and peft's kinds, that read the same rows."""
Part = tuple[nn.Linear, list[str]]
"""The plain layer inside one of them, and the adapters to add to it."""


class SamplingWeights:
    """The products of some linear layers, made again after `renew`.

    Args:
        groups: Layers of one product each; those that the model's own forward calls stand alone.
        plain: Only adapters are added; everything else stays the module's, to the last bit.
        fixed: Copies keep their addresses, for captured steps.
    """

    def __init__(
        self, groups: Sequence[Modules], *, plain: bool = False, fixed: bool = False
    ) -> None:
        self._groups, self._plain, self._fixed = list(groups), plain, fixed
        self._products: dict[Modules, Product] = {}
        self._held: dict[Modules, Tensor] = {}
        self.stale = True

    @property
    def held(self) -> list[Tensor]:
        """Copies that a captured step reads; they keep their addresses."""
        return list(self._held.values())

    def renew(self) -> None:
        """The weights are others, or other adapters are active."""
        self.stale = True

    def free(self) -> None:
        """Give the memory back until the next forward."""
        self._products, self._held, self.stale = {}, {}, True

    def refresh(self) -> None:
        """Make the stale copies again."""
        if not self.stale:
            return
        found = {group: [find_parts(layer) for layer in group] for group in self._groups}
        whole = {group: [part for part in parts if part] for group, parts in found.items()}
        wanted = {
            group: parts
            for group, parts in whole.items()
            if len(parts) == len(group)
            and not (self._plain and not any(names for _, names in parts))
        }
        weights = [layer.weight for parts in wanted.values() for layer, _ in parts]
        if not copies_weights(weights):
            wanted = {}
        for group in self._groups:
            self._products.pop(group, None)  # before its successor is made
            if group in wanted:
                self._products[group] = self._make(group, wanted[group])
        self.stale = False

    def product(self, group: Modules) -> Product:
        """Return the product of a group."""
        found = self._products.get(group)
        return _by_modules(group) if found is None else found

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Run forwards of the model with the products of its layers, in inference mode."""
        for (layer,), product in self._products.items():
            layer.forward = _any_shape(product)
        try:
            yield
        finally:
            for (layer,) in self._products:
                del layer.forward

    def _make(self, group: Modules, parts: Sequence[Part]) -> Product:
        """Return the product of the layers of a group with their adapters added."""
        inner = [layer for layer, _ in parts]
        first, rows = inner[0].weight, [len(layer.weight) for layer in inner]
        way = "by input" if self._plain else "torch"
        if not self._plain and not self._fixed:
            way = fastest_way(first, sum(rows), first.shape[1])
        if way == "torch" and len(group) == 1 and not parts[0][1]:
            return WAYS[way](first, inner[0].bias)
        into = self._held.get(group)
        if into is None:
            into = first.new_empty(sum(rows), first.shape[1])
        for target, layer, (base, names) in zip(torch.split(into, rows), group, parts, strict=True):
            target.copy_(base.weight)
            for name in names:
                target += layer.get_delta_weight(name)
        if way == "torch":
            self._held[group] = into
        return WAYS[way](into, _join_bias(inner))


def linear_layers(model: nn.Module) -> list[Modules]:
    """Return the linear layers of a model that its forward calls, each alone; not the parts of an adapter."""
    inside = {
        id(part)
        for m in model.modules()
        if hasattr(m, "base_layer")
        for part in m.modules()
        if part is not m
    }
    return [(m,) for m in model.modules() if id(m) not in inside and find_parts(m)]


def find_parts(layer: Any) -> Part | None:
    """Return a layer's plain linear layer and the adapters to add to it; None if it is more than that."""
    found = lora_parts(layer)
    if found is None or getattr(layer, "merged", False):
        return None
    base, names = found
    if type(base.weight) is not nn.Parameter or not base.weight.numel():
        return None
    exact = [base.weight, *(layer.lora_A[name].weight for name in names)] if names else []
    whole = not names or len(names) == len(layer.active_adapters)
    return (base, names) if whole and all(w.dtype == torch.float32 for w in exact) else None


def _join_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [
            layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
            for layer in layers
        ]
    )


def _by_modules(group: Modules) -> Product:
    if len(group) == 1:
        only: Product = group[0]
        return only
    return lambda rows: torch.cat([layer(rows) for layer in group], -1)


def _any_shape(product: Product) -> Product:
    """Return a product over rows as a module's forward, which has them in any shape."""
    return lambda rows: product(rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:-1], -1)
