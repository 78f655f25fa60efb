"""Checkpoints: a Hugging Face model folder (or a peft adapter folder) that also holds what a resume needs.

A checkpoint is written beside its place, under a hidden name, and renamed into it; an older one of the same name is
renamed aside before and deleted after. So a folder with this name is always whole, wherever the process is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl_cli.errors import ModelError, StoreError
from agentrl_cli.policies.local_load import ADAPTER_FILE
from agentrl_cli.policies.local_loaded import save_model

STATE = "trainer.pt"
"""Optimizer, random numbers and step; the rest of the folder is the model."""
LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|old)-(?P<pid>[0-9]+)")
"""What a checkpoint is called while it is written, and while it is replaced."""


def save_checkpoint(folder: Path, model: nn.Module, tokenizer: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; an older one of the same name is replaced. Raises StoreError where the disk is full.

    What dead processes left in the same parent folder is swept first.
    """
    sweep(folder.parent)
    beside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        save_model(model, tokenizer, beside)
        torch.save(state, beside / STATE)
        replace_folder(beside, folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise StoreError(
            f"The checkpoint {folder.name} could not be written: {error}",
            hint="Free some disk space, then go on with `agentrl train --resume last`.",
        ) from error


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`, which may exist: two renames, then the old one is deleted. Raises OSError.

    Killed between the two, the old one lies aside under a hidden name; `sweep` puts it back.
    """
    aside = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    new.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Tidy up after processes that died while they wrote checkpoints into `parent`, which may not exist.

    An old checkpoint that was renamed aside is put back where its replacement did not come; everything else goes.
    """
    for path in sorted(parent.glob(".*-*")) if parent.is_dir() else ():
        found = LEFTOVER.fullmatch(path.name)
        if found is None or _alive(int(found["pid"])):
            continue
        place = path.with_name(found["name"])
        if found["kind"] == "old" and not place.exists() and whole(path):
            path.rename(place)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    """Whether another process has this number; our own leftovers are those of a save that failed."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def load_state(folder: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint. Raises ModelError where it is missing or corrupt."""
    try:
        state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"The checkpoint {folder} cannot be resumed from: {why}", hint="Delete it; an older one is taken then."
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
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    own = set(model.state_dict())
    if set(weights) - own and hasattr(
        model, "from_pretrained"
    ):  # names of the published files (vision-language models)
        weights = type(model).from_pretrained(folder, local_files_only=True).state_dict()  # type: ignore[attr-defined]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if set(missing) - tied or unexpected:
        raise ModelError(f"The checkpoint {folder} does not fit the model: {[*missing, *unexpected][:3]} …")


def whole(folder: Path) -> bool:
    """Whether a checkpoint folder has both its state and all its weights; one torn by a crash does not."""
    if not (folder / STATE).is_file():
        return False
    if (folder / ADAPTER_FILE).is_file():
        return (folder / "adapter_model.safetensors").is_file()
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    except (OSError, ValueError, KeyError):
        return False
    return all((folder / shard).is_file() for shard in shards or {"model.safetensors"})
