"""A checkpoint as a plain Hugging Face folder: an adapter is merged into its base, full weights are copied.

The folder holds weights, tokenizer, chat template and a model card, and nothing of the trainer; it is written beside
its place and renamed into it, so that it is whole or not there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from agentrl_cli.chat.families import family_of
from agentrl_cli.config import ModelConfig
from agentrl_cli.errors import TemplateError, UsageError, writing
from agentrl_cli.models.adapter import ADAPTER_FILE
from agentrl_cli.models.checkpoint import CHECKSUMS, written_whole
from agentrl_cli.models.device import pick_dtype
from agentrl_cli.models.load import (
    adapter_base,
    load_model,
    load_tokenizer,
    model_folder,
    read_config,
    require_undamaged,
)
from agentrl_cli.models.save import copy_tokenizer
from agentrl_cli.store import Store

NOT_COPIED = {"trainer.pt", "README.md", ".gitattributes", CHECKSUMS}


@dataclass(frozen=True, slots=True)
class Merged:
    """A model folder that was written."""

    folder: Path
    source: Path
    adapter: bool
    """True if an adapter was merged, False if full weights were copied."""
    dtype: str
    files: tuple[str, ...] = ()


def merge(
    name: str,
    out: Path,
    config: ModelConfig,
    *,
    base: Path,
    store: Store | None = None,
    dtype: str = "auto",
    force: bool = False,
    card: Callable[[Merged], str] | None = None,
) -> Merged:
    """Write the model that `name` means (as for `load_policy`) to the folder `out`.

    `dtype` is that of the weights written: auto keeps full weights bit by bit, and gives a merged adapter the dtype
    that its base is stored in; the merging itself is done in float32. `force` replaces a folder that is there.
    `card` returns the text of README.md; None for no such file.

    Raises UsageError if `out` is in the way, ModelError, NotFound, TemplateError, StoreError (full disk).
    """
    source = model_folder(name, config, base=base, store=store)
    _refuse(source, out, force)
    adapter = (source / ADAPTER_FILE).is_file()
    under = adapter_base(source, config, base=base) if adapter else source
    tokenizer_home = source if (source / "tokenizer.json").is_file() else under
    tokenizer = load_tokenizer(tokenizer_home, config, base)
    if tokenizer.chat_template is None:
        given = f"--set model.chat.template={family_of(tokenizer)}, or a Jinja file."
        raise TemplateError(f"{tokenizer_home} has no chat template.", hint=given)
    require_undamaged(source)
    with (
        writing(str(out), hint="Free some space, or choose another place."),
        written_whole(out) as beside,
    ):
        if adapter or dtype != "auto":
            _save(source, beside, config, base, dtype, _stored_dtype(under))
        else:
            _copy(source, beside)
        copy_tokenizer(tokenizer_home, beside)
        if config.chat.template is not None:
            (beside / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
        made = Merged(beside, source, adapter, _stored_dtype(beside))
        if card is not None:
            (beside / "README.md").write_text(card(made), encoding="utf-8")
    return replace(made, folder=out, files=tuple(sorted(path.name for path in out.iterdir())))


def _refuse(source: Path, out: Path, force: bool) -> None:
    """Raise UsageError if `out` must not be written to, before anything is written."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder.", hint="Name a folder that is not there yet.")
    if out.exists() and (
        out.resolve() == source.resolve() or out.resolve() in source.resolve().parents
    ):
        raise UsageError(f"{out} holds the model to merge.", hint="Name another folder.")
    if out.exists() and any(out.iterdir()) and not force:
        raise UsageError(
            f"{out} is there already.", hint="Name another folder, or replace it with --force."
        )


def _save(
    source: Path, target: Path, config: ModelConfig, base: Path, dtype: str, stored: str
) -> None:
    whole = config.replace(dtype="float32", device="cpu", quantization="none")
    model = merge_adapter(load_model(source, whole, base=base))
    wanted = pick_dtype(stored if dtype == "auto" else dtype, next(model.parameters()).device)
    model.to(wanted).save_pretrained(target)


def merge_adapter(model: Any) -> Any:
    """Return a model with its adapter merged into its weights; one without an adapter as it is."""
    if hasattr(model, "merge_and_unload"):
        # An adapted head gets weights of its own: merged into a tied one, its adapter would change the embedding too.
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        under = getattr(head, "base_layer", None)
        if under is not None and under.weight is embedding.weight:
            under.weight = nn.Parameter(under.weight.detach().clone())
            model.get_base_model().config.tie_word_embeddings = False
        model = model.merge_and_unload(safe_merge=True)
    return model


def _copy(source: Path, target: Path) -> None:
    """Copy all files of a model folder but the trainer's, links followed (the hub's cache is made of them)."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in NOT_COPIED and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)


def _stored_dtype(folder: Path) -> str:
    """Return the dtype of the weights by config.json; float32 where it names none."""
    data = read_config(folder)
    return str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
