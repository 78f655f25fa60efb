"""`agentrl engine`: a vLLM server of the project's model, in an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    Context,
    ModelOption,
    ProjectOption,
    SetOption,
    echo,
    narrate,
    open_project,
    stop_event,
)

app = typer.Typer(
    name="engine", help="A vLLM server of the project's model, in its own environment."
)
EnvOption = Annotated[
    Path | None, typer.Option("--env", metavar="FOLDER", help="The environment; engine.env.")
]


@app.command()
def install(
    env: EnvOption = None,
    project: ProjectOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Install the pinned vLLM into an environment of its own, with uv or pip; prints the folder."""
    from agentrl_cli.plugins.engines.server import install as make

    context = open_project(
        project, None, config, sets, {"engine.env": env and str(env)}, required=False
    )
    echo(str(make(context.config, narrate)))


@app.command()
def start(
    model: ModelOption = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")
    ] = 8000,
    env: EnvOption = None,
    project: ProjectOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
) -> None:
    """Serve the project's model on the loopback, ready to train with; Ctrl-C ends it.

    Prints the address. `agentrl train --set engine.start=true` starts one that ends with the run.
    """
    flags = {"model.name": model, "engine.env": env and str(env), "remote.backend": "vllm"}
    asyncio.run(_serve(open_project(project, None, config, sets, flags, required=False), port))


async def _serve(context: Context, port: int) -> None:
    """Serve until a signal comes; the server ends with it, also one that has not started yet."""
    from agentrl_cli.models.load import configured_folder

    folder = configured_folder(context.config.model, context.project, context.db)
    serving = asyncio.ensure_future(_run(context, folder, port))
    stopping = asyncio.ensure_future(stop_event().wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _run(context: Context, folder: Path, port: int) -> None:
    """Serve until the server has ended for good. Raises EnvironmentProblem, Unreachable."""
    from agentrl_cli.plugins.engines.server import KEY, run_server

    log = context.db.parent / "logs" / f"engine-{os.getpid()}.log"
    narrate(f"Starting vLLM for {context.config.model.name}; its log: {log}")
    async with run_server(context.config, folder, log, port) as server:
        remote = server.config.remote
        echo(remote.address)
        narrate(f"export {KEY}={os.environ[KEY]}")
        settings = (
            "remote.backend=vllm",
            f"remote.url={remote.address}",
            f"remote.model={remote.model}",
            f"remote.api_key_env={KEY}",
            "remote.backend.processed_logprobs=true",
        )
        narrate(shlex.join(["agentrl", "train", *(w for one in settings for w in ("--set", one))]))
        if server.development:
            narrate(
                "Routes beside /v1 (sleep, weights) need no key: it listens on 127.0.0.1; do not forward the port."
            )
        raise await asyncio.shield(server.failed)
