"""A vision-language model from random weights: a small Qwen2-VL with its processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl_cli.chat.tokenizer import IMAGE_TOKENS, Tokenizer


def make_seeing_model(architecture: Mapping[str, Any], tokenizer: Tokenizer, folder: Path, seed: int) -> nn.Module:
    """The model of a recipe whose `architecture` has `text`, `vision` and `pixels`; writes its processor into `folder`.

    `text` and `vision` are arguments of Qwen2VLConfig's parts, `pixels` the most pixels of an image, which is resized
    to multiples of a token's side.
    """
    from transformers.models.qwen2_vl import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, **architecture["vision"]}
    merge = int(vision["spatial_merge_size"])
    names = {"do_resize": True, "image_processor_type": "Qwen2VLImageProcessor", "merge_size": merge}
    least = (vision["patch_size"] * merge) ** 2
    sizes = {"size": {"shortest_edge": least, "longest_edge": int(architecture["pixels"])}}
    kept = {key: vision[key] for key in ("patch_size", "temporal_patch_size")}
    _write(folder / "preprocessor_config.json", {**names, **sizes, **kept})
    _write(folder / "processor_config.json", {"processor_class": "Qwen2VLProcessor"})
    start, end, image, video = (tokenizer.id_of(token) for token in IMAGE_TOKENS)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    text = {
        "vocab_size": tokenizer.vocab_size,
        **{"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 1024},
        **architecture["text"],
    }
    config: Any = Qwen2VLConfig
    kind: Any = Qwen2VLForConditionalGeneration
    torch.manual_seed(seed)
    given = config(text_config=text, vision_config={**vision, "hidden_size": text["hidden_size"]}, **ids)
    given.tie_word_embeddings = given.text_config.tie_word_embeddings = True
    model: nn.Module = kind(given)
    return model


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
