"""Checkpoints: a Hugging Face model folder (or a peft adapter folder) that also holds what a resume needs.

A checkpoint is written beside its place and renamed into it, so that a folder with this name is always whole.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl_cli.errors import ModelError, StoreError
from agentrl_cli.policies.local_load import ADAPTER_FILE, save_model

STATE = "trainer.pt"
"""Optimizer, random numbers and step; the rest of the folder is the model."""


def save_checkpoint(folder: Path, model: nn.Module, tokenizer: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; an older one of the same name is replaced. Raises StoreError where the disk is full."""
    beside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        save_model(model, tokenizer, beside)
        torch.save(state, beside / STATE)
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise StoreError(
            f"The checkpoint {folder.name} could not be written: {error}",
            hint="Free some disk space, then go on with `agentrl train --resume last`.",
        ) from error


def load_state(folder: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint. Raises ModelError where it is missing or corrupt."""
    try:
        state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise ModelError(
            f"The checkpoint {folder} cannot be resumed from: {error}", hint="Delete it; an older one is taken then."
        ) from error
    return state


def load_weights(model: nn.Module, folder: Path) -> None:
    """Put a checkpoint's weights into a model of the same shape, in place."""
    from safetensors.torch import load_file

    if (folder / ADAPTER_FILE).is_file():
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
        return
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if set(missing) - tied or unexpected:
        raise ModelError(f"The checkpoint {folder} does not fit the model: {[*missing, *unexpected][:3]} …")


def whole(folder: Path) -> bool:
    """Whether a checkpoint folder has both its state and its weights; one torn by a crash does not."""
    return (folder / STATE).is_file() and any(folder.glob("*.safetensors"))
