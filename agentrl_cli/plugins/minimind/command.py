"""`agentrl import minimind`: another project's weights as a folder that transformers loads without its code, and back.

Its decoder is Qwen3's (with norms of queries and keys) or, before that, Llama's, and the names of the weights are the
same: only the configuration is another. https://github.com/jingyaogong/minimind
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from agentrl_cli.commands.common import JsonOption, data_stdout, echo_json, narrate
from agentrl_cli.commands.options import refuse_idle
from agentrl_cli.errors import ModelError, UsageError
from agentrl_cli.models.output_lock import writing


def minimind(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Its model folder, or its .pth file.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write, or a .pth file.")
    ],
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="The folder of a .pth file's tokenizer.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in OUT.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Import a model: minimind's own folder or .pth as a Hugging Face folder; to a .pth for its own loader.

    JSON: {"out", "parameters"}
    """
    source, out = source.expanduser(), out.expanduser()
    refuse_idle("where OUT is a .pth file", {"--tokenizer": out.suffix == ".pth" and tokenizer})
    if out.exists() and (out.is_file() or any(out.iterdir())) and not force:
        raise UsageError(f"{out} exists.", hint="Name another one, or use --force.")
    with data_stdout(), writing(out, "import", None):
        from agentrl_cli.models.checkpoint import written_whole

        if out.suffix == ".pth":
            count = convert(source, out)
        else:
            with written_whole(out, keep=True) as folder:
                count = convert(source, folder, tokenizer)
    if as_json:
        echo_json({"out": str(out), "parameters": count})
    narrate(
        f"{out}: {count:,} weights."
        + ("" if out.suffix == ".pth" else f" Try it: agentrl chat --model {quote(str(out))}")
    )


WEIGHTS = ("model.safetensors", "pytorch_model.bin")
ANGLES, HEAD, EMBEDDING = ("freqs_cos", "freqs_sin"), "lm_head.weight", "model.embed_tokens.weight"
"""Tables that its code computes, the head, which mostly is the embedding, and that."""


def convert(source: Path, out: Path, tokenizer: Path | None = None) -> int:
    """Write a minimind folder or .pth file as a Hugging Face folder, or such a folder as a .pth; return its weights.

    Raises ModelError if the weights are not a dense minimind's, or a tokenizer is missing.
    """
    import torch

    given = _weights(source)
    if out.suffix == ".pth":
        return _export(source, given, out)
    kept = {name: tensor for name, tensor in given.items() if not name.endswith(ANGLES)}
    if HEAD in kept and EMBEDDING in kept and torch.equal(kept[HEAD], kept[EMBEDDING]):
        del kept[HEAD]
    if any(".experts." in name for name in kept):
        raise ModelError(
            f"{source} is a mixture of experts; only dense minimind models can be imported."
        )
    config = _config(source, kept)
    folder = tokenizer or _tokenizer(source)
    from safetensors.torch import save_file

    from agentrl_cli.models.save import copy_tokenizer

    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in kept.items()},
        out / WEIGHTS[0],
        {"format": "pt"},
    )
    config.save_pretrained(out)
    copy_tokenizer(folder, out)
    return sum(tensor.numel() for tensor in kept.values())


def _export(source: Path, kept: dict[str, Any], out: Path) -> int:
    """Write weights as minimind's .pth, half precision."""
    import torch

    queries = "model.layers.0.self_attn.q_proj.weight"
    if lacking := [name for name in (EMBEDDING, queries) if name not in kept]:
        raise ModelError(f"{source} is not a model that minimind loads: it lacks {lacking[0]}.")
    kept = {**kept, HEAD: kept.get(HEAD, kept[EMBEDDING])}
    torch.save({name: tensor.half() for name, tensor in kept.items()}, out)
    return sum(tensor.numel() for name, tensor in kept.items() if name != HEAD)


def _weights(source: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    file = (
        source
        if source.is_file()
        else next((source / n for n in WEIGHTS if (source / n).is_file()), None)
    )
    if file is None:
        raise ModelError(f"{source} has no weights: {' or '.join(WEIGHTS)}, or name a .pth file.")
    try:
        found: Any = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, "cpu", weights_only=True)
        )
    except Exception as error:
        raise ModelError(f"{file} cannot be read as weights: {error}") from error
    if not isinstance(found, Mapping) or not all(
        hasattr(value, "shape") for value in found.values()
    ):
        raise ModelError(f"{file} is not a state dict: names mapped to tensors are expected.")
    return dict(found)


def _config(source: Path, kept: Mapping[str, Any]) -> Any:
    """Return the configuration: from the folder's config.json if there is one, sizes from the weights themselves."""
    from transformers import LlamaConfig, Qwen3Config

    path = source / "config.json"
    given: dict[str, Any] = {}
    if path.is_file():
        try:
            given = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ModelError(f"{path} is not a JSON object: {error}.") from error
    first = "model.layers.0."
    try:
        vocabulary, hidden = kept["model.embed_tokens.weight"].shape
        queries, keys = (kept[f"{first}self_attn.{name}_proj.weight"].shape[0] for name in "qk")
        inner = kept[f"{first}mlp.gate_proj.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise ModelError(f"{source} is not a minimind model: its weights lack {error}.") from error
    norm = kept.get(f"{first}self_attn.q_norm.weight")
    theta = float(given.get("rope_theta") or 1e6)
    heads = int(given.get("num_attention_heads") or 8)
    width = (
        int(norm.shape[0]) if norm is not None else int(given.get("head_dim") or queries // heads)
    )
    if given.get("inference_rope_scaling"):
        raise ModelError(
            f"{source} stretches positions (inference_rope_scaling), which is not imported."
        )
    kind = LlamaConfig if norm is None else Qwen3Config
    return kind(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, head_dim=width,
        num_hidden_layers=1 + max(int(name.split(".")[2]) for name in kept if name.startswith("model.layers.")),
        num_attention_heads=queries // width, num_key_value_heads=keys // width,
        max_position_embeddings=int(given.get("max_position_embeddings") or 32768),
        rms_norm_eps=float(given.get("rms_norm_eps") or (1e-5 if norm is None else 1e-6)),
        rope_parameters={"rope_type": "default", "rope_theta": theta}, attention_bias=False,
        tie_word_embeddings=HEAD not in kept,
        bos_token_id=int(given.get("bos_token_id") or 1), eos_token_id=int(given.get("eos_token_id") or 2),
        architectures=["LlamaForCausalLM" if norm is None else "Qwen3ForCausalLM"],
        dtype=str(next(iter(kept.values())).dtype).removeprefix("torch."),
    )  # fmt: skip


def _tokenizer(source: Path) -> Path:
    """Return the folder of minimind's tokenizer: the model's own, or `model/` beside the folder of a .pth file."""
    folder = source if source.is_dir() else source.parent
    for place in (folder, folder.parent / "model"):
        if (place / "tokenizer.json").is_file():
            return place
    raise ModelError(
        f"No tokenizer.json beside {source}.", hint="--tokenizer FOLDER, minimind's `model`."
    )
