"""A small GGUF file, written with the package that writes the real ones; and a wheel that carries it."""

import base64
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.paths import bundled_model

WIDTH, INNER, HEADS, LAYERS = 64, 128, 2, 2


def write_gguf(path: Path, *, pre: str = "smollm", template: str | None = None) -> Path:
    """Write a Llama of two layers in Q8_0 with the tokens of the bundled model."""
    import gguf

    given = json.loads((bundled_model() / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {**given["model"]["vocab"]}
    special = {token["content"]: token["id"] for token in given["added_tokens"]}
    tokens = sorted(vocabulary | special, key=(vocabulary | special).__getitem__)
    pairs = [" ".join(p) if isinstance(p, list) else p for p in given["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(pairs)
    start, end = special["<|im_start|>"], special["<|im_end|>"]
    writer.add_bos_token_id(start)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_chat_template(template or TEMPLATE)
    rng = np.random.default_rng(0)

    def put(name: str, *shape: int) -> None:
        value = rng.normal(0, 0.05, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)

    put("token_embd.weight", len(tokens), WIDTH)
    put("output_norm.weight", WIDTH)
    half = WIDTH // HEADS
    for n in range(LAYERS):
        put(f"blk.{n}.attn_norm.weight", WIDTH)
        put(f"blk.{n}.ffn_norm.weight", WIDTH)
        put(f"blk.{n}.attn_q.weight", WIDTH, WIDTH)
        put(f"blk.{n}.attn_k.weight", half, WIDTH)
        put(f"blk.{n}.attn_v.weight", half, WIDTH)
        put(f"blk.{n}.attn_output.weight", WIDTH, WIDTH)
        put(f"blk.{n}.ffn_gate.weight", INNER, WIDTH)
        put(f"blk.{n}.ffn_up.weight", INNER, WIDTH)
        put(f"blk.{n}.ffn_down.weight", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Of the kind that SmolLM2 has: any role, no tools.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tensor(path: Path, name: str) -> Any:
    import gguf

    found = next(one for one in gguf.GGUFReader(path).tensors if one.name == name)
    return gguf.quants.dequantize(found.data, found.tensor_type)


def write_wheel(folder: Path, gguf_file: Path) -> Path:
    """Write the wheel of a package `small-model` 1.0 that carries a GGUF file."""
    wheel, info = folder / "small_model-1.0-py3-none-any.whl", "small_model-1.0.dist-info"
    files = {
        f"small_model/{gguf_file.name}": gguf_file.read_bytes(),
        f"{info}/LICENSE": b"Free as air.\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel
