"""QLoRA: base weights in 4 or 8 bits through bitsandbytes, under an adapter that is trained (arXiv:2305.14314)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from agentrl_cli.errors import ConfigError, EnvironmentProblem


def quantization(bits: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` needs to load weights in `4bit` (nf4, constants quantised too) or `8bit`.

    Raises EnvironmentProblem on a CPU and where bitsandbytes is not installed.
    """
    if device.type != "cuda":
        raise EnvironmentProblem(
            f"model.quantization={bits} needs a GPU; this run is on {device}.",
            hint="On a CPU leave model.quantization at none; a small model fits without it.",
        )
    if find_spec("bitsandbytes") is None:
        raise EnvironmentProblem(
            f"model.quantization={bits} needs bitsandbytes, which is not installed.",
            hint="pip install 'agentrl-cli[quant]'",
        )
    return {"quantization_config": settings(bits, dtype), "device_map": {"": device}}


def settings(bits: str, dtype: torch.dtype) -> Any:
    """transformers' BitsAndBytesConfig."""
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


def check_trainable(bits: str, adapter: bool) -> None:
    """Raises ConfigError where quantised weights themselves were to be trained."""
    if bits != "none" and not adapter:
        raise ConfigError(
            f"Weights in {bits} cannot be trained themselves.", hint="Train an adapter over them: --lora."
        )
