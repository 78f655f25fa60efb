"""How weights lie in memory."""

from __future__ import annotations

import torch
from torch import nn


def lay_by_input(model: nn.Module) -> None:
    """Let the weights of float32 linear layers on a CPU lie by input, in place; shapes and values stay.

    A product with few rows, as in sampling, then takes MKL up to a third less time, and a long one as much as before.
    The head stays as it is, for which this is slower, and so does a weight that an embedding reads by rows.
    """
    kept = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kept.add(id(getattr(head, "weight", None)))
    for module in model.modules():
        if (
            type(module) is not nn.Linear
            or type(module.weight) is not nn.Parameter
            or id(module.weight) in kept
        ):
            continue
        weight = module.weight.data
        if weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous():
            module.weight.data = weight.T.contiguous().T


def lay_by_output(model: nn.Module) -> None:
    """Let all weights lie as torch makes them, in place: sharding takes no others."""
    for weight in model.parameters():
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()
