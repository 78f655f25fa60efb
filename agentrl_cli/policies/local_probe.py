"""Which engine would serve a model, found with a small one of its architecture and random weights: nothing is loaded.

`agentrl doctor` runs it in a child process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentrl_cli.policies.local_attention import NotServed
from agentrl_cli.policies.local_engine import FAIR_SHARE, choose_engine, free_memory
from agentrl_cli.policies.local_graphs import Capture, CudaCapture
from agentrl_cli.policies.local_load import pick_device, pick_dtype
from agentrl_cli.policies.local_loaded import quiet
from agentrl_cli.policies.local_paged import check_pages

Recorder = Callable[[], Capture]
WORDS = 512
"""Tokens that the small model knows."""


def probe_engine(
    folder: Path,
    device_name: str = "auto",
    dtype_name: str = "auto",
    graphs: str = "auto",
    *,
    record: Recorder | None = None,
) -> tuple[str, str]:
    """The engine for the model in `folder` and why it is no faster one; full size decides about copies of weights.

    `record`: what would record its steps, if not CUDA graphs on a GPU; with `graphs` "off" nothing does.
    Raises OSError, ValueError where the folder's configuration cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "vision_config", None) is not None:
        return "plain", "it reads images"
    device = pick_device(device_name)
    dtype = pick_dtype(dtype_name, device)
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(p.numel() for p in make.from_config(config).parameters()) * dtype.itemsize
    _shrink(config)
    model = make.from_config(config).to(device, dtype).eval()
    record = partial(CudaCapture, device) if record is None and device.type == "cuda" else record
    record = None if graphs == "off" else record
    try:
        engine = choose_engine(model, own=record is not None)
    except NotServed as why:
        return "plain", why.message
    if record is not None:
        try:
            check_pages(engine, model, record)
        except NotServed as why:
            return engine.name, why.message
        return f"{engine.name} with CUDA graphs", ""
    if engine.copies and size > FAIR_SHARE * free_memory(device):
        return "shared", "a copy of the weights takes more than a quarter of the free memory"
    return engine.name, engine.why


def _shrink(config: Any) -> None:
    """Few layers, one of each kind at least, and few tokens, in place."""
    kinds = list(getattr(config, "layer_types", None) or [])
    layers = max(2, *(kinds.index(kind) + 1 for kind in set(kinds))) if kinds else 2
    config.num_hidden_layers = min(layers, int(config.num_hidden_layers))
    if kinds:
        config.layer_types = kinds[: config.num_hidden_layers]
    config.vocab_size = min(WORDS, int(config.vocab_size))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)


if __name__ == "__main__":
    print("\n".join(probe_engine(Path(sys.argv[1]), *sys.argv[2:])))
