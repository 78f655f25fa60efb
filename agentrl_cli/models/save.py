"""Writing a model, or its adapter, with the tokenizer's files, as transformers and peft load them."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

BASE = "base.json"
"""In an adapter's folder: the hash of its base when that was loaded, `seal_of`."""
BASE_SEAL = "base_seal"
"""The attribute of an adapted model with that hash."""
KEPT = (
    *("tokenizer", "chat_template", "special_tokens", "vocab", "merges", "added_tokens"),
    *("preprocessor_config", "processor_config", "video_preprocessor_config"),
)
"""How the files begin that a tokenizer and an image processor are made from."""


def save_model(model: nn.Module, tokenizer_folder: Path, folder: Path) -> None:
    """Write a model (or a peft model's adapter) and its tokenizer files, as transformers and peft load them."""
    quiet()
    # By default peft asks the hub for the base's vocabulary, to see whether embeddings must be saved: we never resize.
    options = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, **options)  # type: ignore[operator]  # a transformers or peft model
    copy_tokenizer(tokenizer_folder, folder)
    if seal := getattr(model, BASE_SEAL, ""):
        (folder / BASE).write_text(json.dumps({"seal": seal}), encoding="utf-8")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and image processor files from a model folder into another."""
    for path in source.iterdir():
        kept = path.name.startswith(KEPT)
        if kept and path.is_file():
            (target / path.name).write_bytes(path.read_bytes())


def quiet() -> None:
    """Turn off transformers' own bars for reading and writing weights: they are a second's work and narrate nothing."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
