"""Loading a policy: a model in this process, a server, or the scripted one, as the configuration says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from agentrl_cli.chat.audit import EVERY, Conversations, audit, require_append_only
from agentrl_cli.chat.render import Chat
from agentrl_cli.config import Config
from agentrl_cli.config.models import ModelConfig
from agentrl_cli.inference.cuda_graphs import CudaCapture, GraphRunner
from agentrl_cli.inference.memory import cuda_graphs_enabled, parse_memory, rollout_memory
from agentrl_cli.inference.model_runner import ModelRunner
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.models.adapter import ADAPTER_FILE, add_adapter, name_base, twin
from agentrl_cli.models.device import pick_device
from agentrl_cli.models.load import (
    adapter_base,
    configured_length,
    context_length,
    is_hub_id,
    load_model,
    load_tokenizer,
    model_folder,
)
from agentrl_cli.models.quantise import check_trainable
from agentrl_cli.models.vision import attach
from agentrl_cli.paths import portable
from agentrl_cli.policies.loaded import Loaded
from agentrl_cli.policies.protocols import require_trainable
from agentrl_cli.policies.remote.load import is_remote, remote_policy
from agentrl_cli.policies.scripted import ScriptedPolicy

if TYPE_CHECKING:
    from agentrl_cli.store import Store

_LOG = logging.getLogger(__name__)


def load_policy(
    spec: str | None,
    config: Config,
    *,
    base: Path,
    store: Store | None = None,
    trainable: bool = False,
    conversations: Callable[[], Conversations] | None = None,
) -> Loaded:
    """Load what `spec` names: None (`model.name`), "tiny", a folder, a Hugging Face id, `RUN@best|last|base|STEP`.

    `trainable` keeps the weights in the dtype of training and, with `adapter.enabled`, puts a LoRA adapter on. A chat
    template that cannot be trained with is refused: for all conversations, or for those that the packs can hold, which
    `conversations` says.
    Raises ModelError, NotFound, TemplateError.
    """
    name = spec or config.model.name
    if name == "scripted":
        return _scripted()
    folder = model_folder(name, config, base=base, store=store)
    tokenizer = load_tokenizer(folder, config.model, base)
    settings = config.model
    chat = Chat(tokenizer, settings.parser, settings.append_only, variables=settings.template_variables)
    if trainable:
        # What packs can hold is read from their rows: not for the many templates that fit all conversations.
        held = EVERY if conversations is None or audit(chat).append_only else conversations()
        require_append_only(chat, held)
    remote = remote_policy(config, chat, context_length=configured_length(folder)) if is_remote(spec, config) else None
    if remote is not None and not trainable:
        return Loaded(remote, chat, None, config.remote.model or name, folder)
    if remote is not None:
        require_trainable(remote)
    model = _weights(folder, name, config, base=base, trainable=trainable)
    if remote is not None:
        return Loaded(
            remote, chat, model, name, folder, sync=(base / (config.remote.sync_dir or "runs/remote")).resolve()
        )
    chat = _seeing(chat, model, folder, config.model, base)
    policy, sampler = make_policy(model, config, name, tokenizer.decode, trainable)
    return Loaded(policy, chat, model, name, folder, sampler)


def _seeing(chat: Chat, model: nn.Module, folder: Path, config: ModelConfig, base: Path) -> Chat:
    """The chat of a model that reads images, which then has its image processor; any other's as it is."""
    under = [adapter_base(folder, config, base=base)] if (folder / ADAPTER_FILE).is_file() else []
    made = partial(Chat, chat.tokenizer, config.parser, config.append_only, variables=config.template_variables)
    return attach(model, [folder, *under], lambda images: made(images=images)) or chat


def _weights(folder: Path, name: str, config: Config, *, base: Path, trainable: bool) -> nn.Module:
    """The model, in the dtype of training and with a fresh adapter where it is to be trained."""
    settings = config.model
    if trainable:
        check_trainable(config, pick_device(settings.device))
    if trainable and not config.adapter.enabled and settings.dtype == "auto":
        # Full weights are trained in float32: a small learning rate would vanish in bfloat16.
        settings = settings.model_copy(update={"dtype": "float32"})
    model = load_model(folder, settings, base=base)
    if trainable and config.adapter.enabled and not (folder / ADAPTER_FILE).is_file():
        torch.manual_seed(config.seed)  # of the adapter's first weights
        model = add_adapter(model, config.adapter, base)
        if is_hub_id(name, base):
            name_base(model, name, config.model.revision)
        elif (inside := portable(str(folder), (base,))) != str(folder):
            name_base(model, inside, None)
    return model


def _scripted() -> Loaded:
    from agentrl_cli.chat.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    return Loaded(ScriptedPolicy(["Hello."], tokenizer), Chat(tokenizer), None, "scripted", None)


def make_policy(
    model: nn.Module, config: Config, name: str, decode: Callable[[list[int]], str] | None, trainable: bool
) -> tuple[LocalPolicy, nn.Module | None]:
    """The policy, and the model that it samples with where that is not `model`.

    In a training keys and values take no more than its episodes can need, which is what plan.py counts.
    """
    length = context_length(model)
    memory = parse_memory(config.rollout.memory)
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
        runner=runner_for(config, next(model.parameters()).device),
    )
    policy, sampler = make(model), None
    if trainable and config.rollout.async_staleness and not policy.copies_weights:
        sampler = twin(model)
        policy = make(sampler)
    if policy.context_length < min(length, config.rollout.max_tokens):
        _LOG.warning(
            "rollout.memory holds %d tokens: episodes end there, not at rollout.max_tokens", policy.context_length
        )
    return policy, sampler


def runner_for(config: Config, device: torch.device) -> Callable[[nn.Module], ModelRunner] | None:
    """What runs the model if not the policy's own choice: CUDA graphs on a GPU, where the configuration wants them."""
    if device.type != "cuda" or not cuda_graphs_enabled(config):
        return None
    return partial(GraphRunner, make=partial(CudaCapture, device))
