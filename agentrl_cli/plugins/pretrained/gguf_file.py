"""GGUF files, converted once into Hugging Face folders whose weights can be trained."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.commands.common import narrate
from agentrl_cli.errors import MissingDependency, ModelError
from agentrl_cli.errors import writing as disk_writing
from agentrl_cli.models.output_lock import writing
from agentrl_cli.paths import list_places, models_cache

if TYPE_CHECKING:
    from agentrl_cli.config import ModelConfig

CONVERTER = 2
"""Raised when files would be converted otherwise than before: those of an earlier one in the cache are not used."""
DIGITS = {"smollm"}
"""Pre-tokenizers that split every digit off, of which transformers reads the rest alone."""


def find_model(name: str, config: ModelConfig, base: Path) -> Path | None:
    """Return the folder of the model in a GGUF file, converted first if it is not in the cache.

    None if `name` is not such a file.
    """
    from agentrl_cli.models.checkpoint import written_whole

    places = list_places(name, base)
    file = next((place for place in places if place.suffix == ".gguf" and place.is_file()), None)
    if file is None:
        return None
    facts = file.resolve().stat()
    key = f"{CONVERTER} {file.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    folder = models_cache() / f"{file.stem}-{digest}"
    if not (folder / "config.json").is_file():
        require_reader()
        narrate(f"{file.name}: its weights are dequantised to bfloat16, once, into {folder}")
        with (
            writing(folder, "model get", None),
            disk_writing(str(folder)),
            written_whole(folder) as beside,
        ):
            convert(file, beside)
    return folder


def require_reader() -> None:
    """Raise MissingDependency if the package that reads GGUF files is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependency(
            "Reading a GGUF file needs the package gguf.", hint="pip install 'agentrl-cli[gguf]'"
        )


def convert(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into `folder`, in bfloat16. Raises ModelError."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from agentrl_cli.models.adapter import short
    from agentrl_cli.models.save import quiet

    quiet()
    # Plain weights: newer releases may keep them packed.
    plain: Any = getattr(transformers, "GgufConfig", None)
    how = {} if plain is None else {"quantization_config": plain(dequantize=True)}
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    # Alone in a folder: transformers takes tokenizer and template of files beside it for those of the GGUF file.
    with tempfile.TemporaryDirectory() as alone:
        Path(alone, file.name).symlink_to(file.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, **where)
            where["config"] = config = AutoConfig.from_pretrained(alone, **where)
            if (width := _head_width(file, config)) is not None:
                config.head_dim = width
            model: Any = AutoModelForCausalLM.from_pretrained(
                alone, dtype=torch.float32, **where, **how
            )
        except Exception as error:  # its readers raise whatever a cut or foreign file makes them
            raise ModelError(
                f"{file} cannot be read: {short(error)}",
                hint="Copy or download the file again; transformers reads the GGUF files of some architectures only.",
            ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # its weights are plain now
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _split_digits(file, folder / "tokenizer.json")


def _head_width(file: Path, config: Any) -> int | None:
    """Return the width of a head that transformers does not read for the architecture of a file; None if it does."""
    from gguf import GGUFReader
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    reader, model = GGUFReader(file), config.model_type
    name = reader.get_field("general.architecture")
    width = name and reader.get_field(f"{name.contents()}.attention.key_length")
    known: Any = GGUF_CONFIG_MAPPING
    tables = (known.get(kind, {}) for kind in (model, model.removesuffix("_text")))
    read = any("attention.key_length" in table for table in tables)
    return (
        None if width is None or read or not hasattr(config, "head_dim") else int(width.contents())
    )


def _split_digits(file: Path, path: Path) -> None:
    """Let a tokenizer cut numbers as in the model's training, if transformers does not."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, pre_tokenizers

    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() not in DIGITS:
        return
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]
    )
    tokenizer.save(str(path))
