"""`agentrl screens`: the terminal screens in a browser, on this machine."""

from __future__ import annotations

import secrets
import shlex
import sys
from typing import Annotated
from urllib.parse import quote

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import DbOption, ProjectOption, echo, narrate
from agentrl_cli.commands.place import find_db


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Watch this run; without it, the list of runs.", autocompletion=completion.runs
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="A loopback address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port.")] = 7575,
    token: Annotated[
        str | None,
        typer.Option(envvar="AGENTRL_TOKEN", help="The token; by default a new one each time."),
    ] = None,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Serve the screens over HTTP on the loopback address, behind a token; needs the extra `serve`.

    Prints the address to open, with the token. Anyone with the token can do everything the screens can. From another
    machine, use `ssh -L 7575:127.0.0.1:7575`.
    """
    path = find_db(project, db)
    if run is not None:
        from agentrl_cli.store import Store

        with Store.open(path, readonly=True) as store:
            run = store.runs.get(run).id
    from agentrl_cli.plugins.browser.server import make_server, serve

    secret = token or secrets.token_urlsafe(24)
    code = f"from pathlib import Path; from agentrl_cli.tui.app import start; start(Path({str(path)!r}), {run!r})"
    server = make_server(shlex.join([sys.executable, "-c", code]), host, port, secret)

    def listening() -> None:
        echo(f"{server.address}/?token={quote(secret, safe='')}")
        narrate("Open this address in a browser; ctrl+c stops the server, trainings keep running.")

    serve(server, listening)
