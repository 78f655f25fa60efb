"""Devices and number formats that a configuration names, and the memory that is free on a device."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from agentrl_cli._version import __version__
from agentrl_cli.errors import ModelError


def pick_device(name: str) -> torch.device:
    """Return a device; `auto` is the GPU, if there is one. Raises ModelError for a device that this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(
            f"Unknown model.device {name!r}.", hint="Use auto, cpu, cuda or cuda:1."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "model.device says cuda, and torch finds no GPU here.",
            hint="`agentrl doctor` says why.",
        )
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return a dtype; `auto` is bfloat16 on a GPU that has it, float32 elsewhere."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return (
        torch.bfloat16
        if device.type == "cuda" and torch.cuda.is_bf16_supported()
        else torch.float32
    )


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):  # not Linux
        return 4 * 2**30


def identity(device: torch.device) -> dict[str, str]:
    """Return the facts that a device's numbers depend on: its name, the driver and the libraries' versions."""
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    driver = Path("/proc/driver/nvidia/version")
    found = (
        re.search(r"\d+(\.\d+)+", driver.read_text(encoding="ascii")) if driver.is_file() else None
    )
    build = torch.version.cuda or torch.version.hip or "cpu"
    versions = {"torch": f"{torch.__version__} ({build})", "transformers": transformers.__version__}
    return {"device": name, "driver": found[0] if found else "", **versions, "agentrl": __version__}
