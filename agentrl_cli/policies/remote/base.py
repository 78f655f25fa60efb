"""The connection of all policies on a server, as the section `remote` of the configuration describes it."""

from __future__ import annotations

import os
from typing import Any

from agentrl_cli.config.records import PolicySettings
from agentrl_cli.errors import ConfigError
from agentrl_cli.policies.remote.http import Endpoint

NO_IMAGES = "Servers are sent token ids alone, without images."


class RemotePolicy:
    """A policy that samples on a server."""

    endpoint: Endpoint

    async def reach(self) -> None:
        """Raise PolicyError unless the server answers within seconds."""
        await self.endpoint.reach()

    async def close(self) -> None:
        await self.endpoint.close()


def connection(config: PolicySettings, url: str = "") -> dict[str, Any]:
    """Return the arguments of Endpoint; `url`: one of several servers, whose turns can move to another one.

    Raises ConfigError if the address or the API key's variable is missing.
    """
    remote = config.remote
    if not (url or remote.address):
        raise ConfigError(
            "remote.backend needs remote.url.", hint="vllm and openai: http://host:8000/v1."
        )
    key = os.environ.get(remote.api_key_env, "") if remote.api_key_env else ""
    if remote.api_key_env and not key:
        raise ConfigError(
            f"remote.api_key_env names {remote.api_key_env}, which is not set in the environment.",
            hint="Export it, or set remote.api_key_env to the one that holds the key.",
        )
    return {
        "url": url or remote.address,
        "api_key": key,
        "concurrency": config.rollout.concurrency,
        "timeout": remote.request.timeout,
        "retries": min(remote.request.retries, 1) if url else remote.request.retries,
        "patience": 0.0 if url else remote.request.patience,
    }
