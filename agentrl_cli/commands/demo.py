"""`agentrl demo`: a tool learned in minutes: init, train, evaluate base against trained, in one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands.common import echo, narrate
from agentrl_cli.errors import UsageError
from agentrl_cli.paths import PROJECT_FILE

FolderArgument = Annotated[Path, typer.Argument(metavar="[DIR]", help="The project's folder; made if it is missing.")]
WeakOption = Annotated[bool, typer.Option("--yes", "-y", help="Accept the isolation that this machine offers.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Training steps; default: the pack's.")]
PackOption = Annotated[str, typer.Option("--pack", help="The pack to learn; `agentrl init --list` names them.")]


def command(
    folder: FolderArgument = Path("demo"),
    pack: PackOption = "code-task",
    steps: StepsOption = None,
    yes: WeakOption = False,
) -> None:
    """Learn a tool in minutes, on a CPU and offline: agentrl init, train and eval in one command.

    The bundled model learns to run Python; its best checkpoint is then compared with the base model on tasks that it
    never saw. Run again, it trains once more in the same project.
    """
    from agentrl_cli.commands import eval as evaluate
    from agentrl_cli.commands import init, train

    folder = folder.expanduser()
    if (folder / PROJECT_FILE).is_file():
        narrate(f"{folder} is a project already: training in it again.")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not a project.", hint="Name another folder: agentrl demo DIR")
    else:
        init.command(pack, folder, yes=yes)
        narrate("The demo continues by itself: it trains, then evaluates.")
    train.command(steps=steps, project=folder)
    evaluate.command(checkpoint="best", project=folder)
    narrate(f"\nA project with a trained agent is in {os.fspath(folder)}/. Where to look next:")
    for line, what in (
        (f"cd {folder}", ""),
        ("agentrl replay best", "an episode, token by token"),
        ("agentrl watch", "the curves of the run"),
        ("agentrl chat", "talk to the agent; agentrl ls lists every episode"),
        ("agentrl init --blank NAME", "a task of your own"),
    ):
        echo(f"  {line:27}{what}".rstrip())
