"""Model folders that cannot be trained, each with what to do, and models that the paged engine may not serve.

Found by their files, before anything is loaded; importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ModelError

GENERATES = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForImageTextToText",
    "ForVision2Seq",
    "LMModel",
)
"""How the names of classes end that can generate text."""
KINDS = {"full_attention", "sliding_attention"}
"""Layers whose state is plain keys and values: the paged engine may serve them."""
_POINTER = b"version https://git-lfs.github.com"


def refuse_gguf(folder: Path) -> None:
    """Raise ModelError for a folder that holds GGUF files alone."""
    if found := sorted(folder.glob("*.gguf")):
        raise ModelError(
            f"{folder} is not a model folder: it holds GGUF files.",
            hint=f"Name one of them: --model {found[0]}",
        )


def refuse_encoder(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that does not continue its prompt."""
    named = [str(name) for name in config.get("architectures") or ()]
    if config.get("is_encoder_decoder"):
        what = f"{', '.join(named) or config.get('model_type')} is an encoder-decoder model"
    elif (
        named and not any(name.endswith(GENERATES) for name in named) and not config.get("auto_map")
    ):
        what = f"{', '.join(named)} does not generate text"
    else:
        return
    raise ModelError(
        f"The model in {folder} cannot be used: {what}.",
        hint="Use a causal language model: its config.json names an architecture …ForCausalLM.",
    )


def refuse_pointers(folder: Path) -> None:
    """Raise ModelError for weights that git has not fetched."""
    for path in sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")):
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise ModelError(
                    f"{path} is a pointer of git-lfs, not the weights.",
                    hint=f"Fetch them: git lfs install; git -C {folder} lfs pull. Or download the model: hf download.",
                )


def advice(config: Mapping[str, Any], error: BaseException) -> str:
    """Return a hint for a model that transformers could not load."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if isinstance(error, ImportError) and method:
        return f"It is quantised by {method}: use the model that it was made from, with model.quantization=4bit."
    if isinstance(error, ImportError):
        return "Install what is missing, or use another model."
    if "ignore_mismatched_sizes" in str(error):
        return "Its weights have other shapes than config.json says: copy or download the folder again."
    if "does not recognize this architecture" in str(error):
        return "A newer transformers may know it: pip install -U agentrl-cli transformers."
    return "Is the folder complete (config.json, model.safetensors)? Copy or download it again."


def find_obstacle(config: Mapping[str, Any]) -> str:
    """Return why the fallback samples from a model with this text configuration; empty if the paged engine may.

    The engine compares its numbers with the model's own when it is made, so the last word is said then.
    """
    kinds = set(config.get("layer_types") or ()) - KINDS
    if kinds:
        return f"it has layers of the kind {sorted(kinds)[0]}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "mrope_section" in rope:
        return "its positions are three-dimensional"
    if config.get("kv_lora_rank"):
        return "its attention keeps a latent, not keys and values"
    return ""
