"""`agentrl engine`: a vLLM server of the project's model, in an environment of its own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

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
    from agentrl_cli.models.load import model_folder
    from agentrl_cli.plugins.engines.server import KEY, run_server

    folder = model_folder(context.config.model.name, context.config.model, base=context.project)
    log = context.db.parent / "logs" / f"engine-{os.getpid()}.log"
    serving = asyncio.ensure_future(stop_event().wait())
    narrate(f"Starting vLLM for {context.config.model.name}; its log: {log}")
    entered = run_server(context.config, folder, log, port)
    opening = asyncio.ensure_future(entered.__aenter__())
    await asyncio.wait([opening, serving], return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        opening.cancel()
        await asyncio.wait([opening])
        return
    server = opening.result()
    remote = server.config.remote
    ended: asyncio.Future[Any] = server.failed
    try:
        echo(remote.address)
        narrate(f"export {KEY}={os.environ[KEY]}")
        narrate(
            f"agentrl train --set remote.backend=vllm --set remote.url={remote.address}"
            f" --set remote.model={remote.model}"
            f" --set remote.api_key_env={KEY} --set remote.backend.processed_logprobs=true"
        )
        if server.development:
            narrate(
                "Routes beside /v1 (sleep, weights) need no key: it listens on 127.0.0.1; do not forward the port."
            )
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ended.result()
    finally:
        await entered.__aexit__(None, None, None)
