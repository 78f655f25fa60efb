"""How much memory keys and values may take: the setting in words, and the bytes of a position."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl_cli.config.records import PolicySettings
from agentrl_cli.errors import ConfigError
from agentrl_cli.inference.kv_cache import round_up
from agentrl_cli.models.device import free_memory

AUTO_SHARE = 0.5
"""Of the memory that is free when the policy is made."""
PREFILL = 8192
"""Prompt tokens of all sequences together, padding included, in one forward; fewer in wide models."""
PREFILL_BYTES = {4: 2**26, 2: 2**24}
"""What the three tensors of the feed-forward part may take in such a forward, by the bytes of a number: 16 bits mean a
GPU, where 500 tokens fill the products of a model that is large enough for this to count."""
MOST_GRAPHS = 32
"""CUDA graphs that are kept (cuda_graphs.py)."""
GRAPH = 2 * 2**20
"""Bytes of one of them beside its tensors. A guess: none was measured."""
COPIES = {"cpu": 2**31, "cuda": 2**28}
"""Most bytes of the copies of linear layers that sampling multiplies with (sampling_weights.py)."""
COPIES_SHARE = 0.25
"""Of free memory, at most."""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_memory(text: str, key: str = "rollout.memory") -> int | None:
    """Bytes of `2GiB`, `512 MB`, `1.5g` or `1000000`; None for `auto`. Raises ConfigError, which names `key`.

    Units are powers of 1024, with or without the i.
    """
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"{key}: {text!r} is not an amount of memory.",
            hint="auto, 2GiB, 512MB or a number of bytes.",
        )
    return int(float(match[1]) * _UNITS[match[2]])


def auto_memory(device: torch.device) -> int:
    """Bytes that keys and values may take by default: half of the free memory of the device."""
    return int(AUTO_SHARE * free_memory(device))


def copies_fit(size: float, device: str, free: float) -> bool:
    """Whether sampling copies linear layers of so many bytes on a kind of device with so much free memory."""
    return size <= min(COPIES.get(device, 0), COPIES_SHARE * free)


def copies_weights(weights: Sequence[Tensor]) -> bool:
    """Whether sampling copies these weights, all together."""
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    device = weights[0].device if weights else torch.device("cpu")
    return device.type in COPIES and copies_fit(size, device.type, free_memory(device))


def cuda_graphs_enabled(config: PolicySettings) -> bool:
    """Whether decode steps are captured on a GPU.

    Not beside an update that draws dropout in another thread: torch hands the device's random numbers to a capture.
    """
    dropout = (
        config.adapter.enabled and config.adapter.dropout > 0 and config.rollout.async_staleness > 0
    )
    return config.rollout.cuda_graphs != "off" and not config.deterministic and not dropout


def graph_bytes(rows: int, vocabulary: int, itemsize: int) -> int:
    """Bytes that captured steps take besides keys and values: their logits, and the graphs themselves by a guess."""
    return rows * vocabulary * itemsize + MOST_GRAPHS * GRAPH


def live_rows(config: PolicySettings) -> int:
    """Return most episodes that a training samples at once; `deterministic` has a slot for each that there might be."""
    rollout, most = config.rollout, min(config.rollout.concurrency, 256)
    if config.deterministic or rollout.async_staleness:
        return most
    return min(most, rollout.group_size * rollout.prompts_per_step)


def kv_positions(config: PolicySettings) -> int:
    """Positions that the episodes of a training can need at once, and one sequence more for prefixes.

    A group's prompt is kept once. What that saves is known where `rollout.response_tokens` says how much of an episode
    comes after its prompt.
    """
    rollout, rows = config.rollout, live_rows(config)
    whole, after = (rows + 1) * round_up(rollout.max_tokens), rollout.response_tokens
    if config.deterministic:
        return rows * round_up(rollout.max_tokens)  # fixed slots share nothing
    if after is None or after >= rollout.max_tokens or rollout.group_size < 2:
        return whole
    groups = min(rollout.prompts_per_step * (1 + rollout.async_staleness), rows)
    own = round_up(after + 1)  # the last token of a prompt is a sequence's own
    return min(whole, groups * round_up(rollout.max_tokens - after) + (rows + 1) * own)


def rollout_memory(model: Any, given: PolicySettings) -> int:
    """Bytes that keys and values may take in a training by default: its largest need, if that is free."""
    config, weight = model.config.get_text_config(), model.get_input_embeddings().weight
    needed = kv_positions(given) * position_bytes(config, weight.dtype)
    return min(needed, auto_memory(weight.device))


def inner_size(config: Any) -> int:
    """Width of the feed-forward part, of the widest layer, by the text configuration."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(size) if isinstance(size, list | tuple) else size)


def prefill_tokens(config: Any, itemsize: int) -> int:
    """Return most prompt tokens in one forward, by the text configuration: 8,192, down to 512 where a layer is wide."""
    return max(
        512, min(PREFILL, PREFILL_BYTES.get(itemsize, 2**26) // (3 * inner_size(config) * itemsize))
    )


def position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one position in all layers, as the text configuration of a model tells."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * dim * dtype.itemsize
