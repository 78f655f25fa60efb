"""Models and tokenizers from nothing: a byte-level BPE, a small Qwen3, a small Qwen2-VL with its processor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from agentrl_cli.chat.tiny_template import IMAGE_TOKENS, tiny_template
from agentrl_cli.chat.tokenizer import Tokenizer


def train_tokenizer(
    texts: Iterable[str],
    folder: Path,
    *,
    vocabulary: int,
    split: str,
    specials: Sequence[str],
    context: int,
    images: bool = False,
) -> Tokenizer:
    """Train a byte-level BPE and write it into `folder` in Hugging Face's form, with the bundled models' template.

    No token crosses a match of the expression `split`. `images`: whether it has the tokens of images.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    words = pre_tokenizers.Split(Regex(split), "isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*specials, *(IMAGE_TOKENS if images else ())],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # The markers of tools are ordinary text that happens to be one token: they stay visible when decoded.
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    _write(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(tiny_template(images), encoding="utf-8")
    return Tokenizer.load(folder)


def make_model(architecture: Mapping[str, Any], vocabulary: int, seed: int) -> nn.Module:
    """Make a Qwen3 with random weights; `architecture` is arguments of Qwen3Config."""
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        **dict(architecture),
    )
    return cast(nn.Module, Qwen3ForCausalLM(config))


def make_seeing_model(
    architecture: Mapping[str, Any], tokenizer: Tokenizer, folder: Path, seed: int
) -> nn.Module:
    """Make a Qwen2-VL with random weights, and write its processor into `folder`.

    `architecture` has `text` and `vision`, arguments of Qwen2VLConfig's parts, and `pixels`, the most pixels of an
    image, which is resized to multiples of a token's side.
    """
    from transformers.models.qwen2_vl import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **architecture["vision"],
    }
    token = vision["patch_size"] * int(vision["spatial_merge_size"])
    processor = {
        "do_resize": True,
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": int(vision["spatial_merge_size"]),
        "size": {"shortest_edge": token**2, "longest_edge": int(architecture["pixels"])},
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }
    _write(folder / "preprocessor_config.json", processor)
    _write(folder / "processor_config.json", {"processor_class": "Qwen2VLProcessor"})
    start, end, image, video = (tokenizer.id_of(token) for token in IMAGE_TOKENS)
    ids = {
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
    text = {
        "vocab_size": tokenizer.vocab_size,
        **{"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0},
        "max_position_embeddings": 1024,
        **architecture["text"],
    }
    config: Any = Qwen2VLConfig
    torch.manual_seed(seed)
    given = config(
        text_config=text, vision_config={**vision, "hidden_size": text["hidden_size"]}, **ids
    )
    given.tie_word_embeddings = given.text_config.tie_word_embeddings = True
    return cast(nn.Module, Qwen2VLForConditionalGeneration(given))


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
