"""LoRA adapters through peft, and the twin of a model that samples while the model itself is trained.

A twin shares the frozen weights and has trained ones of its own: with an adapter a second adapter on the same base,
with full weights a second copy of them, which the memory plan counts. Its modules are its own too, so that a forward in
one thread and a backward in another share nothing that either of them writes.
A worker in another process gets the trained weights as bytes.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from agentrl_cli.config.models import LoraConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.paths import utf8_name

ADAPTER_FILE = "adapter_config.json"


def transformer(model: nn.Module) -> Any:
    """Return the transformers model inside a peft model, or the model itself."""
    inner: Callable[[], Any] | None = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def has_dropout(model: nn.Module) -> bool:
    """Whether a forward in training draws dropout, so that its numbers are not those of an evaluation."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    settings = {**vars(config), **vars(text)} if config else {}
    # some models draw it by a function, so that no module tells
    return any(
        "drop" in name and isinstance(p, float) and p > 0 for name, p in settings.items()
    ) or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def switch_length(model: nn.Module) -> int:
    """Return the tokens beyond which a context has other rotary frequencies, from its first token on; 0 if it never
    has. Longrope takes them by the longest sequence of a batch.
    """
    config = getattr(transformer(model), "config", None)
    text = getattr(config, "text_config", None) or config
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]  # or by kind of layer
    long = [one for one in kinds if one.get("rope_type") == "longrope"]
    return max((int(one["original_max_position_embeddings"]) for one in long), default=0)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Yield the model in eval mode, and back."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def add_adapter(model: nn.Module, config: LoraConfig, base: Path) -> nn.Module:
    """Return a fresh LoRA adapter by the configuration, or the one that `adapter.path` names, ready to be trained."""
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    if config.path is not None:
        path = base / Path(config.path).expanduser()
        if not (path / ADAPTER_FILE).is_file():
            raise ModelError(
                f"No adapter in {path}.", hint="adapter.path is a folder with adapter_config.json."
            )
        return put_adapter(model, path, trainable=True)
    lora = PeftLora(
        r=config.r,
        lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        task_type="CAUSAL_LM",
    )
    try:
        with quiet_peft():
            adapted: nn.Module = get_peft_model(model, lora)
    except ValueError as error:
        raise ModelError(
            f"The adapter does not fit the model: {short(error)}",
            hint='adapter.target_modules names modules of the model, or is "all-linear".',
        ) from error
    return adapted


def lora_parts(layer: Any) -> tuple[nn.Linear, list[str]] | None:
    """Return the linear layer in a layer and its active LoRA adapters of two matrices; None if it is more than that.

    No adapter is active where they are merged or turned off.
    """
    base = getattr(layer, "base_layer", layer)
    if type(base) is not nn.Linear:
        return None
    if base is layer:
        return base, []
    known = hasattr(layer, "get_delta_weight") and hasattr(layer, "active_adapters")
    biased = any(getattr(layer, "lora_bias", {}).values())
    if not known or getattr(layer, "lora_variant", None) or biased:
        return None
    off = layer.merged or layer.disable_adapters
    return base, [] if off else [name for name in layer.active_adapters if name in layer.lora_A]


UNREADABLE = (
    SafetensorError,
    pickle.PickleError,
    EOFError,
    ValueError,
    RuntimeError,
    OSError,
    KeyError,
)
"""Errors of PEFT for an adapter that is damaged, or does not fit its model."""


def put_adapter(
    model: nn.Module, folder: Path, name: str = "default", *, trainable: bool = False
) -> nn.Module:
    """Return the model with the adapter of a folder beside those it has, under a name. In eval mode. Raises ModelError.

    `trainable`: the weights of a first adapter require a gradient.
    """
    from peft import PeftModel

    try:
        with quiet_peft(), utf8_name(folder) as named:
            if hasattr(model, "peft_config"):
                loader: Any = model
                loader.load_adapter(str(named), adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, str(named), name, is_trainable=trainable)
    except UNREADABLE as error:
        raise ModelError(f"The adapter in {folder} cannot be loaded: {short(error)}") from error
    return model.eval()


def use_adapter(model: Any, name: str | None) -> None:
    """Let a model with adapters compute with one of them; None: without any."""
    with quiet_peft():
        if name is None:
            model.base_model.disable_adapter_layers()
        else:
            model.base_model.enable_adapter_layers()
            model.set_adapter(name)


def drop_adapter(model: Any, name: str) -> nn.Module:
    """Return the model without an adapter; without its last one, the model as it was before."""
    with quiet_peft():
        if list(model.peft_config) == [name]:
            bare: nn.Module = model.unload()
            return bare
        model.delete_adapter(name)
    kept: nn.Module = model
    return kept


def name_base(model: nn.Module, name: str, revision: str | None) -> None:
    """Let an adapter name its base as the hub or the project does, not a folder of this machine."""
    configs: Any = getattr(model, "peft_config", {})
    for config in configs.values():
        config.base_model_name_or_path, config.revision = name, revision


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence warnings of peft 0.19 that no user can act on.

    It asks transformers 5 for a name that is on its way out; and it warns that an adapter on a tied head is not to be
    merged as it is, which `merge` sees to; and that another adapter is active once one is deleted, though
    the caller chooses one for each turn.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"Model has `tie_word_embeddings=True` and a tied layer", UserWarning
        )
        warnings.filterwarnings(
            "ignore", r"Adapter \S+ was active which is now deleted", UserWarning
        )
        warnings.filterwarnings(
            "ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


def short(error: BaseException) -> str:
    """Return the first line of an error of another library."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def twin(model: nn.Module) -> nn.Module:
    """Return a model in eval mode that shares the frozen parameters of `model` and has copies of the trained ones.

    Raises nothing of its own; the copies require no gradient.
    """
    shared = {id(weights): weights for weights in model.parameters() if not weights.requires_grad}
    other = copy.deepcopy(model, shared)
    for weights in other.parameters():
        if id(weights) not in shared:
            weights.requires_grad_(False)
    return other.eval()


@torch.no_grad()
def copy_trained(source: nn.Module, target: nn.Module) -> None:
    """Give a twin the weights that its model has now. Nothing may compute with either meanwhile."""
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        if ours is not theirs:
            theirs.copy_(ours)
    for old, new in zip(target.buffers(), source.buffers(), strict=True):
        old.copy_(new)


def trained_weights(model: nn.Module) -> bytes:
    """Return the parameters that require a gradient and all buffers that are saved, as a safetensors file."""
    named: dict[str, torch.Tensor] = {
        name: one for name, one in model.named_parameters() if one.requires_grad
    }
    saved = model.state_dict()
    named |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()})


@torch.no_grad()
def put_weights(model: nn.Module, data: bytes | Path) -> None:
    """Give a model the weights of `trained_weights`. Raises ModelError for those of another model."""
    given = load(data.read_bytes() if isinstance(data, Path) else data)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = [
        name for name, tensor in given.items() if name not in own or own[name].shape != tensor.shape
    ]
    if wrong:
        raise ModelError(
            f"The worker's model has no weights {wrong[0]} of this shape ({len(wrong)} differ).",
            hint="Every node needs the same model files and the same release of agentrl.",
        )
    for name, tensor in given.items():
        own[name].copy_(tensor)
