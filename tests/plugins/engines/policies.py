"""Policies on servers whose answers are given."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentrl_cli.plugins.engines.policy import HttpPolicy
from agentrl_cli.plugins.engines.wires import VLLM, Wire
from tests.helpers.remote import server


@asynccontextmanager
async def policy_at(
    answers: Any, wire: Wire = VLLM, *, seen: list[Any] | None = None, **given: Any
) -> AsyncIterator[HttpPolicy]:
    """A policy on a server with the answers of a list in turn, or always the same: a body, or its status and it.

    `seen` gets the requests.
    """

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if seen is not None:
            seen.append({"path": path, **body})
        answer = answers.pop(0) if isinstance(answers, list) else answers
        return answer if isinstance(answer, tuple) else (200, answer)

    async with server(handler) as url:
        policy = HttpPolicy(wire, url if wire is VLLM else url.removesuffix("/v1"), "m", **given)
        yield policy
        await policy.close()
