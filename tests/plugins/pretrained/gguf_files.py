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
# The tensors of a layer.
LAYER = {
    **{"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)},
    **{"attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // HEADS, WIDTH)},
    **{"attn_v": (WIDTH // HEADS, WIDTH), "attn_output": (WIDTH, WIDTH)},
    **{"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)},
}


def write_gguf(path: Path, *, pre: str = "smollm", template: str | None = None) -> Path:
    """Write a Llama of two layers in Q8_0 with the tokens of the bundled model."""
    import gguf

    given = json.loads((bundled_model() / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in given["added_tokens"]}
    vocabulary = {**given["model"]["vocab"], **special}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(p) if isinstance(p, list) else p for p in given["model"]["merges"]]
    start, end = special["<|im_start|>"], special["<|im_end|>"]
    fields = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "head_count": HEADS,
        "head_count_kv": 1,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0,
        "vocab_size": len(tokens),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": tokens,
        "token_types": [3 if token in special else 1 for token in tokens],
        "token_merges": merges,
        "bos_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
        "chat_template": template or TEMPLATE,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType.Q8_0
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(LAYERS) for name, shape in LAYER.items()}
    for name, shape in shapes.items():
        drawn = rng.normal(0, 0.05, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            packed = gguf.quants.quantize(drawn, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
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
