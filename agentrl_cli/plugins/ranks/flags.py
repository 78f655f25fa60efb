"""The options of `agentrl train` about several GPUs and machines."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option


def settings_of(
    gpus: Annotated[
        int | None, Option("--gpus", min=1, help="GPUs of this machine that train together.")
    ] = None,
    ranks: Annotated[
        int | None, Option("--ranks", min=1, help="Processes on the CPU, in place of --gpus.")
    ] = None,
    nodes: Annotated[
        int | None, Option("--nodes", min=1, help="Machines that train together.")
    ] = None,
    node: Annotated[
        int | None, Option("--node", min=0, help="The number of this machine; 0 holds the run.")
    ] = None,
    rendezvous: Annotated[
        str | None,
        Option(
            "--rendezvous", metavar="HOST:PORT", help="Where several machines meet: on the first."
        ),
    ] = None,
) -> dict[str, Any]:
    """Return the settings that the options mean."""
    given = {"gpus": gpus, "processes": ranks, "nodes": nodes, "node": node}
    return {f"ranks.{name}": value for name, value in given.items()} | {
        "ranks.rendezvous": rendezvous
    }
