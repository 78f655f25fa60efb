"""Small vision-language models with random weights in folders, as `save_pretrained` leaves them."""

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.types.plain import byte_of_char

# What templates write for an image.
MARKS = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma": "<start_of_image>",
    "image": "<image>",
}
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
# Written after the published template of Qwen3-VL, shortened: images in tool answers, tools in the
# system message.
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


def byte_tokenizer(mark: str = MARKS["qwen"]) -> ByteTokenizer:
    """256 bytes, then the control tokens of all families."""
    return ByteTokenizer(TEMPLATE.replace(MARKS["qwen"], mark), control=CONTROL)


def png(width: int, height: int, colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, format="PNG")
    return out.getvalue()


def tokenizer_json(tokenizer: ByteTokenizer) -> str:
    """The same vocabulary as a tokenizer.json: a byte-level model without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE(byte_of_char(), []))
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


QWEN: dict[str, Any] = {
    "processor": "qwen2_vl:Qwen2VLImageProcessorPil",
    "text": {
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [1, 1, 2],
            "rope_theta": 10000.0,
        }
    },
    "eye": {"depth": 1, "num_heads": 2, "patch_size": 4, "initializer_range": 0.15},
    "ids": {
        "image_token_id": "<|image_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "video_token_id": "</think>",
    },
    "pixels": {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4},
}
NEWER = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32}
# Two layers of text, one of vision: 48 thousand weights, large enough that no choice is close.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2-VL": QWEN
    | {
        "kind": "Qwen2VL",
        "eye": QWEN["eye"] | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    },
    "Qwen2.5-VL": QWEN
    | {
        "kind": "Qwen2_5_VL",
        "eye": QWEN["eye"] | NEWER | {"window_size": 16, "fullatt_block_indexes": [0]},
    },
    "Qwen3-VL": QWEN
    | {
        "kind": "Qwen3VL",
        "text": QWEN["text"] | {"head_dim": 8},
        "eye": QWEN["eye"]
        | NEWER
        | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    },
    # Image tokens look at each other in both directions; one layer of two has a window.
    "Gemma 3": {
        "kind": "Gemma3",
        "mark": "gemma",
        "processor": "gemma3:Gemma3ImageProcessorPil",
        "text": {"head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        "eye": EYE | {"hidden_size": 16, "image_size": 16, "model_type": "siglip_vision_model"},
        "ids": {"image_token_id": "<image_soft_token>", "boi_token_index": "<start_of_image>"}
        | {"eoi_token_index": "<end_of_image>"},
        "config": {"mm_tokens_per_image": 4},
        "pixels": {"size": {"height": 16, "width": 16}},
        "settings": {"image_seq_length": 4},
    },
    # An image is cut into tiles, each with texts around it.
    "SmolVLM": {
        "kind": "SmolVLM",
        "mark": "image",
        "processor": "smolvlm:SmolVLMImageProcessorPil",
        "text": {"model_type": "llama"},
        "eye": EYE | {"hidden_size": 16, "image_size": 16, "initializer_range": 0.15},
        "ids": {"image_token_id": "<image>"},
        "config": {"pad_token_id": 0, "scale_factor": 2, "tie_word_embeddings": False},
        "pixels": {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        "settings": {"image_seq_len": 4},
    },
    "LLaVA": {
        "kind": "Llava",
        "mark": "image",
        "processor": "clip:CLIPImageProcessorPil",
        "text": {"model_type": "llama"},
        "eye": EYE
        | {"num_hidden_layers": 2, "hidden_size": 16, "image_size": 16, "projection_dim": 16}
        | {"model_type": "clip_vision_model"},
        "ids": {"image_token_id": "<image>"},
        "config": {"image_seq_length": 16},
        "pixels": {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        "settings": {"patch_size": 4, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1},
    },
}
EXTRA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}


def vision_folder(folder: Path, family: str = "Qwen2-VL") -> Path:
    import transformers

    given = FAMILIES[family]
    kind, tokenizer = given["kind"], byte_tokenizer(MARKS[given.get("mark", "qwen")])
    module, _, processor = given["processor"].partition(":")
    place = f"transformers.models.{module}.image_processing_pil_{module}"
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "vocab_size": tokenizer.vocab_size, **given["text"]},
        vision_config=given["eye"],
        **{name: tokenizer.id_of(text) for name, text in given["ids"].items()},
        **given.get("config", {}),
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    if kind == "Gemma3":  # zeros otherwise
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    pixels = getattr(import_module(place), processor)(**given["pixels"])
    settings = {"processor_class": f"{kind}Processor", **given.get("settings", {})}
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
