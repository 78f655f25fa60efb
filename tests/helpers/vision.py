"""A small Qwen2-VL with random weights in a folder, as `save_pretrained` leaves one: processor, tokenizer, template."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from agentrl_cli.chat.tokenizer import ByteTokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- set role = "user" if message.role == "tool" else message.role %}
{%- if message.role != "tool" or loop.first or messages[loop.index0 - 1].role != "tool" %}
{{- "<|im_start|>" + role + "\\n" }}
{%- endif %}
{%- if message.role == "tool" %}{{- "<tool_response>\\n" }}{%- endif %}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- ("\\n" if message.content or not loop.first else "") + "<tool_call>\\n" + ({"name": call.function.name, \
"arguments": call.function.arguments} | tojson) + "\\n</tool_call>" }}
{%- endfor %}
{%- if message.role == "tool" %}{{- "\\n</tool_response>" }}{%- endif %}
{%- if message.role == "tool" and not loop.last and messages[loop.index0 + 1].role == "tool" %}{{- "\\n" }}
{%- else %}{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
"""Written after the published template of Qwen3-VL, shortened: images in tool answers, tools in the system message."""


def byte_tokenizer() -> ByteTokenizer:
    """256 bytes, then the control tokens of the family."""
    return ByteTokenizer(TEMPLATE, control=CONTROL)


def png(width: int, height: int, colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    """An image of one colour."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, format="PNG")
    return out.getvalue()


def tokenizer_json(tokenizer: ByteTokenizer) -> str:
    """The same vocabulary as a tokenizer.json: a byte-level model without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    known = [n for n in range(33, 127)] + [n for n in range(161, 173)] + [n for n in range(174, 256)]
    chars = {n: chr(n) for n in known}
    extra = 0
    for n in range(256):
        if n not in chars:
            chars[n] = chr(256 + extra)
            extra += 1
    assert set(chars.values()) == set(alphabet)
    made = Tokenizer(models.BPE({chars[n]: n for n in range(256)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(token.text, special=token.special) for token in tokenizer.added])
    assert [made.token_to_id(token.text) for token in tokenizer.added] == [token.id for token in tokenizer.added]
    text: str = made.to_str()
    return text


def vision_model(**changes: Any) -> Any:
    """Two layers of text, one of vision: 48 thousand weights, large enough that no choice is close."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    text = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    vision = {
        "depth": 1,
        "embed_dim": 16,
        "num_heads": 2,
        "hidden_size": 32,
        "mlp_ratio": 2,
        "patch_size": 4,
        "initializer_range": 0.15,
    }
    ids = {f"{name}_token_id": tokenizer.id_of(f"<|{text}|>") for name, text in
           (("image", "image_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end"))}  # fmt: skip
    config: Any = Qwen2VLConfig
    made: Any = Qwen2VLForConditionalGeneration
    given = config(text_config=text, vision_config=vision, **ids, video_token_id=tokenizer.vocab_size - 1, **changes)
    return made(given).eval()


def vision_folder(folder: Path) -> Path:
    """The model's folder."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = byte_tokenizer()
    vision_model().save_pretrained(folder)
    processor: Any = Qwen2VLImageProcessorPil
    processor(size={"shortest_edge": 64, "longest_edge": 4096}, patch_size=4).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(tokenizer), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return folder
