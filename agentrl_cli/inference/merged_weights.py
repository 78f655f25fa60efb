"""Samples from a small adapted model at the cost of a plain one: each linear layer with its adapter as one matrix.

An adapter costs two more products and two sums a layer, which in a small model is as much as the layer itself. The sums
of both are held while episodes are sampled, in float32 alone: in 16 bits a sum would round the adapter away, and the
sampler's numbers would no longer be the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MOST_BYTES = 2**28
"""Of all sums together. In a larger model the two products are small beside the layer's own."""


class MergedWeights:
    """The weights of a model's adapted linear layers with their active adapters added. Nothing for other models."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sums: dict[Any, Tensor] = {}  # by layer, of peft's kinds
        self._stale = True

    def renew(self) -> None:
        """The weights are others, or other adapters are active."""
        self._stale = True

    def free(self) -> None:
        """Give the memory back until the next forward."""
        self._sums, self._stale = {}, True

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Run forwards of the model with the sums. For eval and inference mode: no gradient passes them."""
        if self._stale:
            self._add()
        for layer, weight in self._sums.items():
            layer.forward = partial(linear, weight=weight, bias=layer.base_layer.bias)
        try:
            yield
        finally:
            for layer in self._sums:
                del layer.forward

    def _add(self) -> None:
        layers: list[Any] = [layer for layer in self._model.modules() if mergeable(layer)]
        if sum(4 * layer.base_layer.weight.numel() for layer in layers) > MOST_BYTES:
            layers = []
        old, self._sums = self._sums, {}
        for layer in layers:
            weight = layer.base_layer.weight
            into = old.get(layer)
            # Laid out by input: a product with few rows then takes MKL up to a third less time.
            into = weight.new_empty(weight.shape[::-1]).T if into is None else into
            into.copy_(weight)
            for name in layer.active_adapters:
                into += layer.get_delta_weight(name)
            self._sums[layer] = into
        self._stale = False


def mergeable(layer: Any) -> bool:
    """Whether a module is a plain float32 linear layer under active adapters of peft that are two matrices each."""
    base = getattr(layer, "base_layer", None)
    if (
        type(base) is not nn.Linear
        or base.weight.dtype != torch.float32
        or not hasattr(layer, "get_delta_weight")
    ):
        return False
    if layer.disable_adapters or layer.merged or getattr(layer, "lora_variant", None):
        return False
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if (
        not active
        or len(active) != len(layer.active_adapters)
        or any(getattr(layer, "lora_bias", {}).values())
    ):
        return False
    return all(layer.lora_A[name].weight.dtype == torch.float32 for name in active)
