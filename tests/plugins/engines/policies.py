"""Policies on servers that answer by a handler."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentrl_cli.plugins.engines.policy import HttpPolicy
from agentrl_cli.plugins.engines.wires import VLLM, Wire
from tests.helpers.remote import server


@asynccontextmanager
async def policy_at(
    handler: Any, wire: Wire = VLLM, model: str = "m", **given: Any
) -> AsyncIterator[HttpPolicy]:
    """A policy on a server that answers by a handler, or with 200 and always the same."""

    async def always(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, handler

    async with server(handler if callable(handler) else always) as url:
        address = url if wire is VLLM else url.removesuffix("/v1")
        policy = HttpPolicy(wire, address, model, **given)
        yield policy
        await policy.close()
