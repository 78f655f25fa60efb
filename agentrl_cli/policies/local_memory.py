"""How much memory keys and values may take: the setting in words, and what a position costs."""

from __future__ import annotations

import re
from typing import Any

import torch

from agentrl_cli.errors import ConfigError
from agentrl_cli.policies.local_engine import free_memory

AUTO_SHARE = 0.5
"""Of the memory that is free when the policy is made."""
PREFILL = 8192
"""Prompt tokens of all rows together, padding included, in one forward; fewer in wide models, see `prefill_tokens`."""
PREFILL_BYTES = 2**26
"""What the three tensors of the feed-forward part may take in such a forward."""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_memory(text: str) -> int | None:
    """Bytes of `2GiB`, `512 MB`, `1.5g` or `1000000`; None for `auto`. Raises ConfigError.

    Units are powers of 1024, with or without the i.
    """
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text!r} is no amount of memory.", hint="auto, 2GiB, 512MB or a number of bytes.")
    return int(float(match[1]) * _UNITS[match[2]])


def auto_memory(device: torch.device) -> int:
    """Bytes that keys and values may take where nobody says: half of what is free on the device."""
    return int(AUTO_SHARE * free_memory(device))


def prefill_tokens(config: Any, itemsize: int) -> int:
    """Most prompt tokens in one forward, by the text configuration: 8,192, down to 512 where a layer is wide."""
    inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return max(512, min(PREFILL, PREFILL_BYTES // (3 * inner * itemsize)))


def position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one position in all layers, as the text configuration of a model tells."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * dim * dtype.itemsize
