"""The policy that samples with a loaded model, as the configuration says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from agentrl_cli.config import Config
from agentrl_cli.policies.local import LocalPolicy
from agentrl_cli.policies.local_graphs import Capture, CudaCapture
from agentrl_cli.policies.local_memory import parse_memory, records, rollout_memory
from agentrl_cli.policies.local_twin import twin

_LOG = logging.getLogger(__name__)


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
        lanes=config.deterministic,
        decode=decode,
        lane_length=min(length, config.rollout.max_tokens),
        memory=memory,
        record=recorder(config, next(model.parameters()).device),
        trains=trainable,
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


def recorder(config: Config, device: torch.device) -> Callable[[], Capture] | None:
    """What makes recorders of decode steps: CUDA graphs on a GPU, where the configuration lets them be."""
    return partial(CudaCapture, device) if device.type == "cuda" and records(config) else None


def context_length(model: nn.Module) -> int:
    """Positions that a model's configuration allows."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", None) or 4096)
