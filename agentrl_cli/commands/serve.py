"""`agentrl serve`: the model and its adapters for any OpenAI or Anthropic client, every call recorded."""

from __future__ import annotations

import asyncio
from socket import gethostname
from typing import Annotated

import typer

from agentrl_cli.commands.common import (
    Context,
    ModelOption,
    announce_loading,
    echo,
    narrate,
    stop_event,
)
from agentrl_cli.commands.options import ProjectOptions, plugin_settings
from agentrl_cli.errors import UsageError

AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]RUN@STEP",
        help="A LoRA adapter of a run, or its folder; repeatable.",
    ),
]
AliasOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A further name of the model, as an agent has it built in; repeat. '*': any.",
    ),
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")]


def command(
    model: ModelOption = None,
    adapter: AdapterOption = None,
    alias: AliasOption = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write every conversation to the store as an episode.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; off the loopback it needs a token.")
    ] = "127.0.0.1",
    port: PortOption = 8484,
    token: Annotated[
        str, typer.Option(envvar="AGENTRL_TOKEN", help="The API key that clients must bring.")
    ] = "",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A further name that this machine has for clients; repeat."),
    ] = None,
    idle: Annotated[
        float, typer.Option(min=1, help="Seconds without a call after which a session ends.")
    ] = 900.0,
    *,
    work: ProjectOptions,
) -> None:
    """Serve a model over HTTP for any OpenAI or Anthropic client: chat completions, completions, responses, messages.

    Prints the base_url. With `/e/NAME/v1` in place of `/v1` all calls of one agent are one session; with --record each
    session is an episode in the store, with the very tokens that were sampled. Ctrl-C ends the server.
    """
    from agentrl_cli.agents.gateway.http import is_loopback
    from agentrl_cli.rollout.recorder import make_observers

    if not is_loopback(host) and not token:
        raise UsageError(
            f"{host} can be reached from other machines: a token is needed.",
            hint="--token TOKEN, or AGENTRL_TOKEN.",
        )
    context = work.open(required=False)
    if not record and any(plugin_settings().values()) and make_observers(context.config):
        raise UsageError(
            "Of the served conversations those that are recorded are sent.", hint="Add --record."
        )
    announce_loading()
    names = {"localhost", host, gethostname(), *(allow_host or ())}
    asyncio.run(
        _serve(
            context, model, (adapter or [], alias or []), record, (host, port, token), names, idle
        )
    )


async def _serve(
    context: Context,
    model: str | None,
    named: tuple[list[str], list[str]],
    record: bool,
    where: tuple[str, int, str],
    names: set[str],
    idle: float,
) -> None:
    from agentrl_cli.hooks.waits import interruptible

    with interruptible():
        from agentrl_cli.agents.gateway.http import listening
        from agentrl_cli.agents.serve.server import open_server

    host, port, token = where
    opened = open_server(
        context.config,
        base=context.project,
        db=context.db,
        spec=model,
        adapters=named[0],
        aliases=named[1],
        record=record,
        token=token,
    )
    async with opened as server:
        ending = stop_event()
        async with listening(server.app(names), host, port) as address:
            echo(f"{address}/v1")
            served = ", ".join(str(card["id"]) for card in server.models.cards())
            narrate(f"Serving {served}; ctrl+c ends the server.")
            if server.run:
                narrate(
                    f"Recording into {server.run} of {context.db}: agentrl ls --run {server.run}"
                )
            sweeping = asyncio.create_task(server.sweep(idle))
            await ending.wait()
            sweeping.cancel()
