"""How much memory keys and values may take: the setting in words, and what a position costs."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError
from agentrl_cli.policies.local_bases import base_length
from agentrl_cli.policies.local_cache import BLOCK, rounded
from agentrl_cli.policies.local_engine import free_memory
from agentrl_cli.policies.local_fused import FAMILIES

AUTO_SHARE = 0.5
"""Of the memory that is free when the policy is made."""
PREFILL = 8192
"""Prompt tokens of all rows together, padding included, in one forward; fewer in wide models, see `prefill_tokens`."""
PREFILL_BYTES = {4: 2**26, 2: 2**24}
"""What the three tensors of the feed-forward part may take in such a forward, by the bytes of a number: 16 bits mean a
GPU, where 500 tokens fill the products of a model that is large enough for this to count."""
STAY_SHARE = 0.125
"""Of the memory that is free when the policy is made: what recorded steps take, with the keys and values that stay
where they are while a model is trained, must not be more. A small card has other use for it."""
GATHERED = 2**28
"""Bytes of one layer's keys and values that a step over pages attends to at a time."""
WIDE = 2**24
"""Rows times vocabulary of one draw where steps are recorded, for which there is memory then."""
MOST_GRAPHS = 32
"""Recorded steps that are kept (local_graphs.py)."""
GRAPH = 2 * 2**20
"""Bytes of one of them on a GPU beside its tensors. A guess: none was measured."""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_memory(text: str) -> int | None:
    """Bytes of `2GiB`, `512 MB`, `1.5g` or `1000000`; None for `auto`. Raises ConfigError.

    Units are powers of 1024, with or without the i.
    """
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"rollout.memory: {text!r} is no amount of memory.", hint="auto, 2GiB, 512MB or a number of bytes."
        )
    return int(float(match[1]) * _UNITS[match[2]])


def auto_memory(device: torch.device) -> int:
    """Bytes that keys and values may take where nobody says: half of what is free on the device."""
    return int(AUTO_SHARE * free_memory(device))


def live_rows(config: Config) -> int:
    """Most episodes that a training samples at once; `deterministic` has a lane for each that there might be."""
    rollout, most = config.rollout, min(config.rollout.concurrency, 256)
    if config.deterministic or rollout.async_staleness:
        return most
    return min(most, rollout.group_size * rollout.prompts_per_step)


def kv_positions(config: Config, *, shares: bool) -> int:
    """Positions that the episodes of a training can need at once, and one more row: one that moves is there twice.

    `shares`: a group's prompt is kept once. What that saves is known where `rollout.response_tokens` says how much of
    an episode comes after its prompt.
    """
    rollout, rows = config.rollout, live_rows(config)
    whole, after = (rows + 1) * rounded(rollout.max_tokens), rollout.response_tokens
    if config.deterministic:
        return rows * rounded(rollout.max_tokens)  # lanes: nothing moves or is shared
    if not shares or after is None or after >= rollout.max_tokens or rollout.group_size < 2:
        return whole
    groups = min(rollout.prompts_per_step * (1 + rollout.async_staleness), rows)
    own = rounded(after + 1)  # a prompt's last token is a row's own
    return min(whole, groups * base_length(rollout.max_tokens - after) + (rows + 1) * own)


def share_reach(config: Any) -> int:
    """How long rows may be that attend to common beginnings, by a configuration: 0 outside the families we know."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    return (window or sys.maxsize) if getattr(config, "model_type", "") in FAMILIES else 0


def rollout_memory(model: Any, given: Config) -> int:
    """Bytes that keys and values may take in a training where nobody says: what it can need, if that is free."""
    config, weight = model.config.get_text_config(), model.get_input_embeddings().weight
    shares = given.rollout.max_tokens <= share_reach(model.config)
    needed = kv_positions(given, shares=shares) * position_bytes(config, weight.dtype)
    return min(needed, auto_memory(weight.device))


def records(config: Config) -> bool:
    """Whether decode steps are recorded where there is a GPU.

    Not beside an update that draws dropout in another thread: torch hands the device's random numbers to a recording.
    """
    dropout = config.adapter.enabled and config.adapter.dropout > 0 and config.rollout.async_staleness > 0
    return config.rollout.cuda_graphs != "off" and not config.deterministic and not dropout


def graph_bytes(
    rows: int, positions: int, *, vocabulary: int, inner: int, hidden: int, kv_width: int, itemsize: int
) -> int:
    """Bytes that recorded steps take besides keys and values, by their shapes: `rows` that attend to `positions`.

    The logits; the larger of what is there at a time in a layer (gathered keys and values with their mask, the
    feed-forward part) and of what draws from so many logits take; and the graphs themselves, by a guess.
    """
    seen = min(rows * positions * 2 * kv_width * itemsize, GATHERED)
    layer = seen + rows * (positions + 3 * inner + 6 * hidden) * itemsize
    drawn = 20 * min(rows, wide_rows(vocabulary)) * vocabulary  # five float32, as in plan.py
    return rows * vocabulary * itemsize + max(layer, drawn) + MOST_GRAPHS * GRAPH


def wide_rows(vocabulary: int) -> int:
    """Most rows of logits that tokens are drawn from at once where steps are recorded: a draw costs launches, too."""
    return max(1, WIDE // vocabulary)


def gathered_pages(model: Any) -> int:
    """Most pages of all rows that a step over pages attends to, padding included."""
    config, dtype = model.config.get_text_config(), model.get_input_embeddings().weight.dtype
    return max(1, GATHERED * int(config.num_hidden_layers) // (position_bytes(config, dtype) * BLOCK))


def graphs_fit(model: Any, kept: int, rows: int, positions: int) -> bool:
    """Whether there is memory for recorded steps, and for `kept` bytes of keys and values that stay in a training."""
    config, weight = model.config.get_text_config(), model.get_input_embeddings().weight
    more = graph_bytes(
        rows,
        positions,
        vocabulary=int(weight.shape[0]),
        inner=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        hidden=int(config.hidden_size),
        kv_width=position_bytes(config, weight.dtype) // (2 * int(config.num_hidden_layers) * weight.dtype.itemsize),
        itemsize=weight.dtype.itemsize,
    )
    return kept + more <= STAY_SHARE * free_memory(weight.device)


def prefill_tokens(config: Any, itemsize: int) -> int:
    """Most prompt tokens in one forward, by the text configuration: 8,192, down to 512 where a layer is wide."""
    inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return max(512, min(PREFILL, PREFILL_BYTES.get(itemsize, 2**26) // (3 * inner * itemsize)))


def position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one position in all layers, as the text configuration of a model tells."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * dim * dtype.itemsize
