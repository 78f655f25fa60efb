"""Loading a policy by the configuration: its backend by name, its chat, and the model if there is one here."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from agentrl_cli.chat.audit import EVERY, Conversations, audit, require_append_only
from agentrl_cli.chat.images import Images
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import BaseTokenizer, ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.config.models import ChatConfig, LoraConfig
from agentrl_cli.config.records import PolicySettings, Settings
from agentrl_cli.errors import ConfigError, ModelError
from agentrl_cli.inference.cuda_graphs import CudaCapture, GraphRunner
from agentrl_cli.inference.kv_cache import NotServed
from agentrl_cli.inference.memory import cuda_graphs_enabled, parse_memory, rollout_memory
from agentrl_cli.inference.model_runner import ModelRunner
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.learning.forward import avoid
from agentrl_cli.models.adapter import ADAPTER_FILE, add_adapter, name_base, switch_length, twin
from agentrl_cli.models.checkpoint import seal_of
from agentrl_cli.models.device import check_trainable, pick_device
from agentrl_cli.models.load import (
    adapter_base,
    configured_length,
    context_length,
    is_hub_id,
    load_model,
    load_tokenizer,
    model_folder,
)
from agentrl_cli.models.processor import attach
from agentrl_cli.models.save import BASE_SEAL
from agentrl_cli.paths import models_cache, portable
from agentrl_cli.policies import POLICIES, backend_name
from agentrl_cli.policies.device_check import Verdict, verdict_of
from agentrl_cli.policies.protocols import Backend, Policy, PolicySource, require_trainable
from agentrl_cli.registry import resolve
from agentrl_cli.store.checkpoint_names import pin_version

if TYPE_CHECKING:
    from agentrl_cli.store import Store

_LOG = logging.getLogger(__name__)


SHAPE = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Settings of an adapter that its folder fixes, and peft's names of them."""


@dataclass(slots=True)
class Loaded:
    """A policy with everything that belongs to it."""

    policy: Policy
    chat: Chat
    model: Any
    """The nn.Module; None for a policy without one in this process."""
    name: str
    """The model's name for people: `tiny`, `RUN@best`."""
    folder: Path | None

    @property
    def hash(self) -> str:
        """Hash of the tokenizer, under which the store keeps it."""
        return str(self.chat.tokenizer.hash)


def load_policy(
    spec: str | None,
    settings: Settings | Config,
    *,
    base: Path,
    store: Store | None = None,
    trainable: bool = False,
    conversations: Callable[[], Conversations] | None = None,
) -> Loaded:
    """Load what `spec` names: None (`model.name`), "tiny", a folder, a Hugging Face id, `RUN@best|last|base|STEP`.

    `trainable` keeps the weights in the dtype of training and, with `adapter.enabled`, puts a LoRA adapter on. A chat
    template that cannot be trained with is refused: for all conversations, or for those that the packs can hold, which
    `conversations` returns.
    Raises ModelError, NotFound, TemplateError.
    """
    config = PolicySettings.of(settings)
    name, backend = spec or config.model.name, backend_name(spec, config.model.name, config.remote)
    make: Backend = resolve("policies", POLICIES, backend, base=base)
    if name == "scripted":
        if trainable:
            _no_model()
        chat = Chat(ByteTokenizer())
        policy = make(PolicySource(config, chat, name, None, base, trainable, 32768, _no_model))
        return Loaded(policy, chat, None, name, None)
    folder = model_folder(name, config.model, base=base, store=store)
    chat = _chat(load_tokenizer(folder, config.model, base), config.model.chat)
    if trainable:
        # What packs can hold is read from their rows: not for the many templates that fit all conversations.
        held = EVERY if conversations is None or audit(chat).append_only else conversations()
        require_append_only(chat, held)
    load = partial(load_weights, folder, name, config, base=base, trainable=trainable)
    version, length = pin_version(store, name, folder), configured_length(folder)
    source = PolicySource(config, chat, version, folder, base, trainable, length, load)
    policy = make(source)
    if trainable:
        require_trainable(policy)
        source.model()
    shown = name if source.loaded is not None else config.remote.model or name
    return Loaded(policy, source.chat, source.loaded, shown, folder)


def local_policy(source: PolicySource) -> LocalPolicy:
    """Return the policy that samples in this process."""
    model, config = source.model(), source.config
    assert source.folder is not None
    under = (
        [adapter_base(source.folder, config.model, base=source.base)]
        if _is_adapter(source.folder)
        else []
    )
    folders = [source.folder, *under]
    source.chat = (
        attach(model, folders, partial(_chat, source.chat.tokenizer, config.model.chat))
        or source.chat
    )
    return make_policy(model, config, source.name, source.chat.tokenizer.decode, source.trainable)


def make_policy(
    model: nn.Module,
    config: PolicySettings,
    name: str,
    decode: Callable[[list[int]], str] | None,
    trainable: bool,
) -> LocalPolicy:
    """Return the policy that samples with a loaded model, or with a copy of it that is renewed at every `publish`.

    In a training the KV cache takes no more than its episodes can need, as the memory plan counts them.
    """
    device = next(model.parameters()).device
    verdict = verdict_of(device)
    verdict.require_engine()
    length = context_length(model)
    memory = parse_memory(config.rollout.memory)
    # longer contexts, also of a chat, only if they are asked for
    if switch := switch_length(model):
        length = min(length, max(switch, config.rollout.max_tokens))
    if trainable:
        length = min(length, config.rollout.max_tokens)
        memory = rollout_memory(model, config) if memory is None else memory
    make = partial(
        LocalPolicy,
        context_length=length,
        rows=min(config.rollout.concurrency, 256),
        version=name,
        deterministic=config.deterministic,
        decode=decode,
        slot_length=min(length, config.rollout.max_tokens),
        memory=memory,
        runner=runner_for(config, device, verdict),
    )
    ahead = trainable and config.rollout.async_staleness
    policy = make(twin(model), source=model) if ahead else make(model)
    if policy.context_length < min(length, config.rollout.max_tokens):
        _LOG.warning(
            "rollout.memory holds %d tokens: episodes end there, not at rollout.max_tokens",
            policy.context_length,
        )
    return policy


def runner_for(
    config: PolicySettings, device: torch.device, verdict: Verdict | None = None
) -> Callable[[nn.Module], ModelRunner] | None:
    """Return a maker of the runner for a device, by its verdict; None: the policy's own choice.

    With CUDA graphs if the configuration allows them. A runner that refuses leaves the model to the fallback engine.
    """
    problem = "" if verdict is None else verdict.problem("paged")
    if problem:

        def refuse(_: nn.Module) -> ModelRunner:
            raise NotServed(problem)

        return refuse
    if device.type != "cuda" or not cuda_graphs_enabled(config):
        return None
    graphs = "" if verdict is None else verdict.problem("graphs")
    if graphs:
        _LOG.warning("no CUDA graphs: %s", graphs)
        return None
    return partial(GraphRunner, make=partial(CudaCapture, device))


def _chat(tokenizer: BaseTokenizer, settings: ChatConfig, images: Images | None = None) -> Chat:
    return Chat(
        tokenizer,
        settings.parser,
        settings.append_only,
        variables=settings.variables,
        images=images,
    )


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_FILE).is_file()


def load_weights(
    folder: Path, name: str, config: PolicySettings, *, base: Path, trainable: bool
) -> nn.Module:
    """Return the model, in the dtype of training and with a fresh adapter if it will be trained."""
    settings = config.model
    if trainable:
        check_trainable(config, pick_device(settings.device))
        _require_used(config.adapter, folder)
    if trainable and not config.adapter.enabled and settings.dtype == "auto":
        # Full weights are trained in float32: a small learning rate would vanish in bfloat16.
        settings = settings.replace(dtype="float32")
    seal = seal_of(folder)  # before it is loaded: another training may replace it
    model = load_model(folder, settings, base=base)
    if trainable and config.adapter.enabled and not _is_adapter(folder):
        torch.manual_seed(config.seed)  # of the adapter's first weights
        model = add_adapter(model, config.adapter, base)
        setattr(model, BASE_SEAL, seal)  # for those who load the adapter
        if is_hub_id(name, base):
            name_base(model, name, config.model.revision)
        elif folder.parent == models_cache():
            name_base(model, folder.name, None)
        elif (inside := portable(str(folder), (base,))) != str(folder):
            name_base(model, inside, None)
    if trainable and config.adapter.enabled:
        _require_shape(config.adapter, model, name)
    if trainable:
        avoid(model, verdict_of(next(model.parameters()).device).ways)
    return model


def _require_used(adapter: LoraConfig, folder: Path) -> None:
    """Raise ConfigError if `adapter.path` names an adapter that the training would leave out."""
    if adapter.path is not None and (not adapter.enabled or _is_adapter(folder)):
        why = f"{folder} is an adapter itself" if adapter.enabled else "adapter.enabled is false"
        raise ConfigError(
            f"adapter.path ({adapter.path}) would not be trained: {why}.",
            hint="Train it on a base with --lora, or leave adapter.path out.",
        )


def _require_shape(adapter: LoraConfig, model: Any, name: str) -> None:
    """Raise ConfigError for a setting of `adapter` that is not so in the adapter that the model came with."""
    has, default = model.peft_config["default"], LoraConfig()
    source = adapter.path or name

    def plain(value: Any) -> Any:  # peft writes out "all-linear" as the whole names of its layers
        many = isinstance(value, (list, set))
        return sorted({each.rpartition(".")[2] for each in value}) if many else value

    for key, peft in SHAPE.items():
        wanted, there = plain(getattr(adapter, key)), plain(getattr(has, peft, None))
        if wanted not in (there, getattr(default, key)):
            raise ConfigError(
                f"adapter.{key} ({wanted}) would have no effect: the adapter {source} has {there}.",
                hint=f"Leave adapter.{key} out, or train another on the merged model: agentrl merge"
                f" {shlex.quote(source)} merged && agentrl train --lora --model merged",
            )


def _no_model() -> nn.Module:
    raise ModelError(
        "The scripted policy has no weights.",
        hint="Set model.name to a model, `tiny` for instance.",
    )
