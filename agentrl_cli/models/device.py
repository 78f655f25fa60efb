"""Devices and number formats that a configuration names, and the memory that is free on a device.

QLoRA: base weights in 4 or 8 bits through bitsandbytes, under an adapter that is trained (arXiv:2305.14314).
"""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from agentrl_cli._version import __version__
from agentrl_cli.config import ModelConfig
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.errors import ConfigError, EnvironmentProblem, ModelError, pluralise

CPU_RELEASE = (0, 46)
"""The first release of bitsandbytes that multiplies quantised weights on a CPU."""


def pick_device(name: str) -> torch.device:
    """Return a device; `auto` is the GPU, if there is one. Raises ModelError for a device that this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type != "cuda":  # whose context would take memory
            torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # the second of a kind that this torch lacks
        raise ModelError(
            f"Unknown model.device {name!r} on this machine.", hint="Use auto, cpu, cuda or cuda:1."
        ) from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ModelError(
            f"model.device is {name}, and torch finds {pluralise(count, 'GPU')} here.",
            hint="They are counted from cuda:0; `agentrl doctor` lists them.",
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


def quantization(bits: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` loads weights in `4bit` (nf4, constants quantised too) or
    `8bit`.

    Raises EnvironmentProblem without bitsandbytes, or on a CPU without its kernels for one.
    """
    if find_spec("bitsandbytes") is None:
        raise EnvironmentProblem(
            f"model.quantization={bits} needs bitsandbytes, which is not installed.",
            hint="pip install 'agentrl-cli[quant]', or leave model.quantization at none.",
        )
    if (
        device.type != "cuda"
        and tuple(map(int, version("bitsandbytes").split(".")[:2])) < CPU_RELEASE
    ):
        raise EnvironmentProblem(
            f"model.quantization={bits} on {device} needs bitsandbytes {'.'.join(map(str, CPU_RELEASE))}.",
            hint="pip install -U 'agentrl-cli[quant]'",
        )
    return {"quantization_config": settings(bits, dtype), "device_map": {"": device}}


def quantises(config: ModelConfig) -> bool:
    """Whether this machine can load the model's weights in 8 or 4 bits."""
    return pick_device(config.device).type == "cuda" and find_spec("bitsandbytes") is not None


def settings(bits: str, dtype: torch.dtype) -> Any:
    """Return transformers' BitsAndBytesConfig."""
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig
    if bits == "8bit":
        return make(load_in_8bit=True)
    return make(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def check_trainable(config: PolicySettings, device: torch.device) -> None:
    """Refuse settings that a training on this device cannot have, before a model is loaded and a run is written down.

    Raises ConfigError if quantised weights themselves would be trained, EnvironmentProblem without
    bitsandbytes, and for an 8-bit optimizer on a CPU.
    """
    bits = config.model.quantization
    if bits != "none" and not config.adapter.enabled:
        raise ConfigError(
            f"Weights in {bits} cannot be trained themselves.",
            hint="Train an adapter over them: --lora.",
        )
    if bits != "none":
        quantization(bits, device, torch.float32)
    if config.train.optimizer.name == "adamw8bit":
        check_8bit(device)


def check_8bit(device: torch.device) -> None:
    """Raise EnvironmentProblem if `train.optimizer=adamw8bit` is not available."""
    if device.type != "cuda":
        raise EnvironmentProblem(
            f"train.optimizer=adamw8bit needs a GPU; this run is on {device}.",
            hint="On a CPU: train.optimizer=adamw, or adamw_offload.",
        )
    if find_spec("bitsandbytes") is None:
        raise EnvironmentProblem(
            "train.optimizer=adamw8bit needs bitsandbytes, which is not installed.",
            hint="pip install 'agentrl-cli[quant]', or train.optimizer=adamw_offload.",
        )
