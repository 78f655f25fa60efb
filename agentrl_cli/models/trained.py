"""The trained weights of a model as bytes: with them a worker of the same base samples."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import nn

from agentrl_cli.errors import ModelError


def trained_weights(model: nn.Module) -> bytes:
    """Return the parameters that require a gradient and all buffers that are saved, as a safetensors file."""
    named: dict[str, torch.Tensor] = {
        name: one for name, one in model.named_parameters() if one.requires_grad
    }
    saved = model.state_dict()
    named |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()})


@torch.no_grad()
def put_weights(model: nn.Module, data: bytes | Path) -> None:
    """Give a model the weights of `trained_weights`. Raises ModelError for those of another model."""
    given = load(data.read_bytes() if isinstance(data, Path) else data)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = [
        name for name, tensor in given.items() if name not in own or own[name].shape != tensor.shape
    ]
    if wrong:
        raise ModelError(
            f"The worker's model has no weights {wrong[0]} of this shape ({len(wrong)} differ).",
            hint="Every node needs the same model files and the same release of agentrl.",
        )
    for name, tensor in given.items():
        own[name].copy_(tensor)
