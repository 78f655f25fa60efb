"""Sizes of a model from its configuration, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl_cli.config.models import ModelConfig
from agentrl_cli.config.records import MemorySettings
from agentrl_cli.errors import ModelError


def model_shape(folder: Path, settings: ModelConfig) -> dict[str, int]:
    """Return the sizes of the model in a folder, built on the meta device. Raises ModelError."""
    import torch
    from transformers import AutoConfig

    from agentrl_cli.inference.memory import inner_size, prefill_tokens
    from agentrl_cli.learning.fused_forward import FAMILIES
    from agentrl_cli.models.load import auto_class, remote_code

    more = remote_code(folder, settings)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **more)
        with torch.device("meta"):
            model = auto_class(folder).from_config(config, **more)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The model in {folder} cannot be planned for: {error}") from error
    text: Any = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    linear = [
        m
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and "head" not in name
    ]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": int(text.num_hidden_layers),
        "hidden": int(text.hidden_size),
        "vocabulary": int(text.vocab_size),
        "kv_width": int(heads * width),
        "fused": int(getattr(config, "model_type", "") in FAMILIES),
        "q_width": int(text.num_attention_heads * width),
        "inner": inner_size(text),
        "linear_weights": sum(m.in_features * m.out_features for m in linear),
        "head_norms": int(any(name.endswith(".q_norm") for name, _ in model.named_modules())),
        "prefill4": prefill_tokens(text, 4),
        "prefill2": prefill_tokens(text, 2),
        "linear_in_out": sum(m.in_features + m.out_features for m in linear),
    }


def resolve_adapter(folder: Path, config: MemorySettings) -> tuple[Path, MemorySettings]:
    """Return the base of an adapter that is trained on, and the configuration with the adapter's rank."""
    from agentrl_cli.models.adapter import ADAPTER_FILE
    from agentrl_cli.models.load import adapter_base

    if not (folder / ADAPTER_FILE).is_file() or (folder / "config.json").is_file():
        return folder, config
    try:
        rank = int(json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / ADAPTER_FILE} cannot be read: {error!r}") from error
    adapter = config.adapter.replace(enabled=True, r=rank)
    return adapter_base(folder, config.model, base=folder), config.replace(adapter=adapter)
