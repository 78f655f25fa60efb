"""The option `--openenv` of `agentrl tools serve`, which a page of help reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer

from agentrl_cli.errors import UsageError
from agentrl_cli.registry import require_package


def flags(
    openenv: Annotated[
        bool,
        typer.Option("--openenv", help="Serve the packs as an OpenEnv environment instead."),
    ] = False,
) -> dict[str, Any]:
    """Return the wire that the option means."""
    return {"openenv": openenv or None}


@asynccontextmanager
async def serve(
    context: Any, packs: list[Any], *, host: str, port: int, token: str, names: Any, most: int
) -> AsyncIterator[str]:
    """Serve packs, and yield the address. Raises MissingDependency, UsageError, EnvError."""
    require_package("openenv", "0.10", "openenv-server")
    from agentrl_cli.agents.gateway.http import PageGuard, listening
    from agentrl_cli.plugins.openenv.served import make_app
    from agentrl_cli.rollout.parts import open_parts

    if not packs:
        raise UsageError("No pack is named.", hint="agentrl tools serve --openenv --pack calc-task")
    async with open_parts(context.config, context.project, packs=packs) as parts:
        guard = PageGuard(make_app(parts, context.config, most), names, token=token)
        async with listening(guard, host, port, ws="auto", lifespan="on") as address:
            yield address
