"""From the section `remote` of the configuration to a policy."""

from __future__ import annotations

import os
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.policies.remote.policy import OpenAIPolicy, VLLMPolicy
from agentrl_cli.policies.remote.sglang import SGLangPolicy


def is_remote(spec: str | None, config: Config) -> bool:
    """Whether a server samples: where one is configured, and no other model is asked for by name."""
    return bool(config.remote.backend) and spec in (None, config.model.name)


def remote_policy(config: Config, chat: Chat, *, context_length: int) -> Policy:
    """The server that `remote` names. Raises ConfigError for a key that is not there, PolicyError for a bad address."""
    remote = config.remote
    key = os.environ.get(remote.api_key_env, "") if remote.api_key_env else ""
    if remote.api_key_env and not key:
        raise ConfigError(
            f"remote.api_key_env names {remote.api_key_env}, and there is no such environment variable.",
            hint="Export it, or set remote.api_key_env to the one that holds the key.",
        )
    model = remote.model or config.model.name
    connection: dict[str, Any] = {
        "api_key": key,
        "concurrency": config.rollout.concurrency,
        "timeout": remote.timeout,
        "retries": remote.retries,
        "patience": remote.patience,
    }
    if remote.backend == "openai":
        return OpenAIPolicy(remote.url, model, chat, mode=remote.mode, context_length=context_length, **connection)
    kind = {"vllm": VLLMPolicy, "sglang": SGLangPolicy}[remote.backend]
    return kind(
        remote.url,
        model,
        context_length=context_length,
        processed=remote.processed_logprobs,
        lora=config.adapter.enabled,
        vocabulary=max([chat.tokenizer.vocab_size, *(token.id + 1 for token in chat.tokenizer.added)]),
        **connection,
    )
