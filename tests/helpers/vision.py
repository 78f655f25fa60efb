"""Small vision-language models with random weights in folders, as `save_pretrained` leaves them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from agentrl_cli.chat.tokenizer import ByteTokenizer

MARKS = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma": "<start_of_image>",
    "image": "<image>",
}
"""What templates write for an image."""
CONTROL = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
    ),
    *(
        "<image>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        "<fake_token_around_image>",
    ),
    *("<global-img>", *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))),
)
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


def byte_tokenizer(mark: str = MARKS["qwen"]) -> ByteTokenizer:
    """256 bytes, then the control tokens of all families."""
    return ByteTokenizer(TEMPLATE.replace(MARKS["qwen"], mark), control=CONTROL)


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
    known = (
        [n for n in range(33, 127)] + [n for n in range(161, 173)] + [n for n in range(174, 256)]
    )
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
    assert [made.token_to_id(token.text) for token in tokenizer.added] == [
        token.id for token in tokenizer.added
    ]
    text: str = made.to_str()
    return text


TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EYE: dict[str, Any] = {
    "patch_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def _qwen(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """Two layers of text, one of vision: 48 thousand weights, large enough that no choice is close."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer, auto = byte_tokenizer(), transformers
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**TEXT, "vocab_size": tokenizer.vocab_size, "rope_parameters": rope}
    eyes: dict[str, dict[str, Any]] = {
        "Qwen2VL": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        "Qwen2_5_VL": {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "window_size": 16,
                       "fullatt_block_indexes": [0]},
        "Qwen3VL": {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_position_embeddings": 64,
                    "deepstack_visual_indexes": [0]},
    }  # fmt: skip
    if kind == "Qwen3VL":
        text |= {"head_dim": 8}
    vision = {"depth": 1, "num_heads": 2, "patch_size": 4, "initializer_range": 0.15, **eyes[kind]}
    ids = {f"{name}_token_id": tokenizer.id_of(f"<|{text}|>") for name, text in
           (("image", "image_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end"))}  # fmt: skip
    config = getattr(auto, f"{kind}Config")
    given = config(
        text_config=text, vision_config=vision, **ids, video_token_id=tokenizer.vocab_size - 1
    )
    model = getattr(auto, f"{kind}ForConditionalGeneration")(given)
    processor: Any = Qwen2VLImageProcessorPil
    pixels = processor(size={"shortest_edge": 64, "longest_edge": 4096}, patch_size=4)
    name = {
        "Qwen2VL": "Qwen2VLProcessor",
        "Qwen2_5_VL": "Qwen2_5_VLProcessor",
        "Qwen3VL": "Qwen3VLProcessor",
    }[kind]
    return model, pixels, {"processor_class": name}


def _gemma() -> tuple[Any, Any, dict[str, Any]]:
    """Gemma 3: image tokens look at each other in both directions; one layer of two has a window."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = byte_tokenizer()
    text = {**TEXT, "vocab_size": tokenizer.vocab_size, "head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    names = {"image_token_id": "<image_soft_token>", "boi_token_index": "<start_of_image>",
             "eoi_token_index": "<end_of_image>"}  # fmt: skip
    config: Any = Gemma3Config
    made: Any = Gemma3ForConditionalGeneration
    eye = {**EYE, "hidden_size": 16, "image_size": 16, "model_type": "siglip_vision_model"}
    ids = {name: tokenizer.id_of(token) for name, token in names.items()}
    model = made(config(text_config=text, vision_config=eye, mm_tokens_per_image=4, **ids))
    torch.nn.init.normal_(
        model.model.multi_modal_projector.mm_input_projection_weight, std=0.3
    )  # zeros otherwise
    processor: Any = Gemma3ImageProcessorPil
    pixels = processor(size={"height": 16, "width": 16})
    return model, pixels, {"processor_class": "Gemma3Processor", "image_seq_length": 4}


def _smol() -> tuple[Any, Any, dict[str, Any]]:
    """SmolVLM: an image is cut into tiles, each with texts around it."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tokenizer = byte_tokenizer()
    config: Any = SmolVLMConfig
    made: Any = SmolVLMForConditionalGeneration
    text = {**TEXT, "vocab_size": tokenizer.vocab_size, "model_type": "llama"}
    eye = {**EYE, "hidden_size": 16, "image_size": 16, "initializer_range": 0.15}
    ids = {"image_token_id": tokenizer.id_of("<image>"), "pad_token_id": 0}
    model = made(
        config(
            text_config=text, vision_config=eye, scale_factor=2, tie_word_embeddings=False, **ids
        )
    )
    processor: Any = SmolVLMImageProcessorPil
    pixels = processor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return model, pixels, {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}


def _llava() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = byte_tokenizer()
    config: Any = LlavaConfig
    made: Any = LlavaForConditionalGeneration
    text = {**TEXT, "vocab_size": tokenizer.vocab_size, "model_type": "llama"}
    eye = {**EYE, "num_hidden_layers": 2, "hidden_size": 16, "image_size": 16, "projection_dim": 16,
           "model_type": "clip_vision_model"}  # fmt: skip
    ids = {"image_token_id": tokenizer.id_of("<image>"), "image_seq_length": 16}
    model = made(config(text_config=text, vision_config=eye, **ids))
    processor: Any = CLIPImageProcessorPil
    pixels = processor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    rule = {
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return model, pixels, {"processor_class": "LlavaProcessor", **rule}


FAMILIES: dict[str, tuple[Any, str]] = {
    "Qwen2-VL": (lambda: _qwen("Qwen2VL"), "qwen"),
    "Qwen2.5-VL": (lambda: _qwen("Qwen2_5_VL"), "qwen"),
    "Qwen3-VL": (lambda: _qwen("Qwen3VL"), "qwen"),
    "Gemma 3": (_gemma, "gemma"),
    "SmolVLM": (_smol, "image"),
    "LLaVA": (_llava, "image"),
}
EXTRA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}


def vision_folder(folder: Path, family: str = "Qwen2-VL") -> Path:
    """A model's folder."""
    make, mark = FAMILIES[family]
    torch.manual_seed(0)
    model, pixels, settings = make()
    tokenizer = byte_tokenizer(MARKS[mark])
    model.eval().save_pretrained(folder)
    pixels.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_json(tokenizer), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(str(tokenizer.chat_template), encoding="utf-8")
    names = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    more = {"extra_special_tokens": EXTRA} if family == "Gemma 3" else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **more}), encoding="utf-8")
    return folder
