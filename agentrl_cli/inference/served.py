"""Which models the paged engine may serve, by their configuration alone; importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {"full_attention", "sliding_attention"}
"""Layers whose state is plain keys and values."""


def find_obstacle(config: Mapping[str, Any]) -> str:
    """Return why the fallback samples from a model with this text configuration; empty if the paged engine may.

    The engine compares its numbers with the model's own when it is made, so the last word is said then.
    """
    kinds = set(config.get("layer_types") or ()) - KINDS
    if kinds:
        return f"it has layers of the kind {sorted(kinds)[0]}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "mrope_section" in rope:
        return "its positions are three-dimensional"
    if config.get("kv_lora_rank"):
        return "its attention keeps a latent, not keys and values"
    return ""
