"""QLoRA: base weights in 4 or 8 bits through bitsandbytes, under an adapter that is trained (arXiv:2305.14314)."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from agentrl_cli.config import ModelConfig
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.errors import ConfigError, EnvironmentProblem

CPU_RELEASE = (0, 46)
"""The first release of bitsandbytes that multiplies quantised weights on a CPU."""


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
    from agentrl_cli.models.device import pick_device

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
