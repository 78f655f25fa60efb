"""Loading models: the bundled one, a local folder, a Hugging Face id, a peft adapter, a checkpoint of a run.

Every failure is a ModelError that says which file was looked for, where, and what to do. Loading is transformers'
own; downloads, cache, token and offline mode are huggingface_hub's.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from agentrl_cli.chat.families import FAMILIES, family_template
from agentrl_cli.chat.tokenizer import Tokenizer
from agentrl_cli.config.models import ModelConfig
from agentrl_cli.errors import ModelError, NotFound
from agentrl_cli.models.adapter import ADAPTER_FILE, put_adapter, short
from agentrl_cli.models.checkpoint import CHECKSUMS, damage, seal_of
from agentrl_cli.models.device import pick_device, pick_dtype, quantization
from agentrl_cli.models.save import BASE, BASE_SEAL, quiet
from agentrl_cli.models.unusable import advice, refuse_encoder, refuse_gguf, refuse_pointers
from agentrl_cli.paths import (
    bundled_model,
    is_bundled,
    list_places,
    models_dir,
    portable,
    utf8_name,
)
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers
from agentrl_cli.store import Store
from agentrl_cli.store.checkpoint_names import run_of, select_checkpoint, split_checkpoint
from agentrl_cli.store.journal import INPUTS

_LOG = logging.getLogger(__name__)


def model_folder(name: str, config: ModelConfig, *, base: Path, store: Store | None = None) -> Path:
    """Return the folder a model's name means; a Hugging Face id is downloaded into the hub's cache first."""
    if name == "tiny":
        return bundled_model()
    checkpoint = split_checkpoint(name)
    if checkpoint is not None and store is not None:
        return checkpoint_folder(store, *checkpoint, config, base=base)
    for folder in list_places(name, base):
        if folder.is_dir():
            return _require_model(folder.resolve())
    if is_bundled(name):
        return bundled_model(name)
    for source in offers("models"):
        found: Path | None = resolve("models", {}, source)(name, config, base)
        if found is not None:
            return _require_model(found)
    if not is_hub_id(name, base):
        raise ModelError(
            f"Model {name!r} not found: no such folder, and not a Hugging Face id (those look like `org/name`).",
            hint='`--model tiny` is the bundled model; a checkpoint is written "RUN@best".',
        )
    return _require_model(_download(name, config))


def configured_folder(config: ModelConfig, base: Path, db: Path) -> Path:
    """Return the folder of the model that the settings name, which may be a checkpoint in the store at `db`."""
    with Store.open(db, readonly=True) if db.is_file() else nullcontext() as store:
        return model_folder(config.name, config, base=base, store=store)


def is_hub_id(name: str, base: Path) -> bool:
    """Whether a name that is not a checkpoint's is a Hugging Face hub model: `org/name`, not a folder."""
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not any(folder.is_dir() for folder in list_places(name, base))
    )


def checkpoint_folder(
    store: Store, run: str, which: str, config: ModelConfig, *, base: Path
) -> Path:
    """Return the folder of a run's checkpoint: best, last, base or a step. Raises NotFound naming what there is."""
    row = run_of(store, run)
    if which == "base":
        pinned = (store.journal.newest_event(row.id, INPUTS) or {}).get("model")
        adapter = (row.config.get("adapter") or {}).get("path")
        start = str(base / Path(adapter).expanduser()) if adapter else pinned
        name = start or row.model or config.name
        try:
            return model_folder(name, config, base=base, store=store)
        except NotFound as error:
            raise NotFound(
                f"{row.name} began from {name}, which is not there any more.",
                hint="`agentrl eval --compare-to none` evaluates a checkpoint without its base.",
            ) from error
    found = store.runs.checkpoints(row.id)
    chosen = select_checkpoint(found, which)
    if chosen is None:
        known = sorted({c.kind for c in found if c.kind != "step"} | {str(c.step) for c in found})
        raise NotFound.of(f"checkpoint of {row.name}", which, [*known, "base"])
    folder = Path(chosen.path)
    if not folder.is_dir():
        raise ModelError(
            f"The checkpoint's folder is missing: {folder}.",
            hint=f"Others: agentrl show {row.name}",
        )
    return folder


def load_tokenizer(folder: Path, config: ModelConfig, base: Path) -> Tokenizer:
    """Return the tokenizer of a model folder, with `model.chat.template` in place of its own where one is given."""
    if (folder / ADAPTER_FILE).is_file() and not (folder / "tokenizer.json").is_file():
        folder = adapter_base(folder, config, base=base)
    tokenizer = Tokenizer.load(folder)
    if config.chat.template is not None:
        tokenizer.tool_template = None  # in place of both, where a model has one for tools
    if config.chat.template in FAMILIES:
        tokenizer.chat_template = family_template(config.chat.template)
    elif config.chat.template is not None:
        path = base / Path(config.chat.template).expanduser()
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"No chat template at {path}: {error}.",
                hint=f"Name a file, or one of: {', '.join(FAMILIES)}.",
            ) from error
    return tokenizer


def load_model(folder: Path, config: ModelConfig, *, base: Path) -> nn.Module:
    """Return a causal LM from a model folder, or from an adapter folder with the base that it names. In eval mode."""
    require_undamaged(folder)
    if (folder / ADAPTER_FILE).is_file():
        under = adapter_base(folder, config, base=base)
        seal = compare_base(folder, under)
        adapted = put_adapter(load_model(under, config, base=base), folder, trainable=True)
        setattr(adapted, BASE_SEAL, seal)
        return adapted
    quiet()
    more, written = remote_code(folder, config), _json(folder / "config.json")
    refuse_encoder(folder, written)
    refuse_pointers(folder)
    loader = auto_class(folder)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    quantised = (
        {} if config.quantization == "none" else quantization(config.quantization, device, dtype)
    )
    try:
        with utf8_name(folder) as name:
            model, found = loader.from_pretrained(
                name,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                **more,
                **quantised,
            )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError) as error:
        raise ModelError(
            f"The model in {folder} cannot be loaded: {short(error)}", hint=advice(written, error)
        ) from error
    except (SafetensorError, pickle.PickleError) as error:
        what = (
            short(error)
            if isinstance(error, SafetensorError)
            else "a .bin file is cut short, or holds more than tensors."
        )
        raise ModelError(
            f"The weights in {folder} are corrupt: {what}",
            hint="Copy or download the folder again.",
        ) from error
    _require_complete(folder, found["missing_keys"])
    # Quantised weights are on their device already.
    ready: nn.Module = model.eval() if quantised else model.to(device).eval()
    if more:  # a model's own code may make tables in its first forward: inference mode's could not be trained with
        with torch.no_grad():
            ready(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device))
    return ready


def compare_base(folder: Path, under: Path) -> str:
    """Return the seal of the base of the adapter in `folder`; warn if it was another when the adapter was trained."""
    now = seal_of(under)
    was = _json(folder / BASE).get("seal") if (folder / BASE).is_file() else None
    if was not in (None, now):
        _LOG.warning(
            "The adapter in %s was trained over other weights than its base %s has now, as that was trained on since:"
            " together they are not the model that was trained.",
            folder,
            under,
        )
    return now


def _require_complete(folder: Path, missing: Collection[str]) -> None:
    if missing:
        lost = sorted(missing)
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ModelError(
            f"The weights in {folder} are not all there: it lacks {lost[0]}{others}.",
            hint="transformers would make them up at random. Copy or download the folder again.",
        )


def remote_code(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Return the arguments with which transformers' loaders run a model's own code; empty if it has none.

    Raises ModelError if it has, and `model.trust_remote_code` is off.
    """
    from transformers import CONFIG_MAPPING

    given = read_config(folder)
    own = [
        str(value).rpartition("--")[2]
        for value in (given.get("auto_map") or {}).values()
        if isinstance(value, str)
    ]
    files = sorted({f"{value.partition('.')[0]}.py" for value in own})
    named = str(given.get("model_type", ""))
    kinds = [name for name in offers("imports") if name in named]
    if (not files and not kinds) or named in CONFIG_MAPPING:  # transformers has its code
        return {}
    if files and config.trust_remote_code:
        return {"trust_remote_code": True}
    what = f"runs code of its own, {', '.join(files)}" if files else f"is in {kinds[0]}'s own form"
    hints = ["read it, then set model.trust_remote_code=true"] * bool(files)
    hints += [
        f"import it without its code: {offers('imports')[name]}".replace("SOURCE", str(folder))
        for name in kinds
    ]
    text = "; or ".join(hints)
    raise ModelError(f"The model in {folder} {what}.", hint=f"{text[0].upper()}{text[1:]}.")


def require_undamaged(folder: Path) -> None:
    """Raise ModelError if a model folder that has checksums is not as it was written. A trainer's state may differ."""
    if why := damage(folder, skip=("trainer.pt",)):
        raise ModelError(
            f"The model in {folder} is damaged: {why}.",
            hint=f"Take another checkpoint, or write it again. If the change is yours, delete {CHECKSUMS} in it.",
        )


def auto_class(folder: Path) -> Any:
    """Return the auto class of a folder's model: one that reads images has a vision part, which the causal one would
    drop.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = read_config(folder)
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


def adapter_base(folder: Path, config: ModelConfig, *, base: Path) -> Path:
    """Return the folder of the model that the adapter in `folder` was trained on.

    An adapter of the bundled model stores the path where that was installed at training time: if the folder does not
    exist here, a path that ends in the bundled model's name means the bundled model. Likewise, an absolute path into a
    project that was moved means the project's own model. Raises ModelError.
    """
    named = str(_json(folder / ADAPTER_FILE).get("base_model_name_or_path") or config.name)
    _, path = list_places(named, base)
    own = PurePath(portable(config.name, (base,)))
    inside = (
        folder.resolve().is_relative_to(base.resolve())
        and not path.is_relative_to(base)
        and path.is_absolute()
    )
    if (
        inside
        and not own.is_absolute()
        and (base / own).is_dir()
        and path.parts[-len(own.parts) :] == own.parts
    ):
        return model_folder(str(own), config, base=base)
    moved = path.is_absolute() and not path.is_dir() and is_bundled(path.name)
    if moved or path.parent == models_dir():
        return bundled_model(path.name)
    if named.startswith(
        "./"
    ):  # relative to the project that trained it, which may be another than this one
        places = (place / path for place in (base, *folder.resolve().parents))
        named = str(next((place for place in places if place.is_dir()), named))
    return model_folder(named, config, base=base)


def _require_model(folder: Path) -> Path:
    if not (folder / "config.json").is_file() and not (folder / ADAPTER_FILE).is_file():
        refuse_gguf(folder)
        raise ModelError(
            f"{folder} is not a model folder: it has neither config.json nor {ADAPTER_FILE}.",
            hint="A model folder is what `save_pretrained` writes.",
        )
    return folder


def _download(name: str, config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    offline = config.offline or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "tokenizer*"]
    wanted += ["*.py"] * config.trust_remote_code
    try:
        return Path(
            snapshot_download(
                name, revision=config.revision, allow_patterns=wanted, local_files_only=offline
            )
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated on the Hugging Face hub.",
            hint=f"Accept its terms at https://huggingface.co/{name}, then `hf auth login` or set HF_TOKEN.",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The Hugging Face hub has no model {name!r} (or it is private).",
            hint="Mind the spelling; set HF_TOKEN.",
        ) from error
    except LocalEntryNotFoundError as error:
        why = (
            "offline mode is on and it is not in the cache"
            if offline
            else "the hub cannot be reached"
        )
        raise ModelError(
            f"{name} cannot be had: {why}.",
            hint="Use a local folder, or the bundled model: --model tiny.",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name} could not be downloaded: {short(error)}",
            hint="Try again, or use a local folder.",
        ) from error


def _json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path.parent} cannot be loaded: {path.name} cannot be read: {error}"
        ) from error
    return data


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return a folder's config.json; empty without one."""
    return _json(folder / "config.json") if (folder / "config.json").is_file() else {}


def configured_length(folder: Path) -> int:
    """Return the positions of the model in a folder by its configuration alone: nothing is loaded."""
    config = read_config(folder)
    found = config.get("max_position_embeddings") or (config.get("text_config") or {}).get(
        "max_position_embeddings"
    )
    return int(found or 32768)


def context_length(model: nn.Module) -> int:
    """Return the positions that a model's configuration allows."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", None) or 4096)
