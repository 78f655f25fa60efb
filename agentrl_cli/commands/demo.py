"""`agentrl demo`: a tool learned in minutes: init, train, evaluate base against trained, in one command."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands import eval as evaluate
from agentrl_cli.commands import init, train
from agentrl_cli.commands.common import echo, narrate, open_project
from agentrl_cli.commands.dry import PlanOptions
from agentrl_cli.commands.options import ModelOptions, WorkOptions, refuse_idle
from agentrl_cli.errors import UsageError
from agentrl_cli.paths import PROJECT_FILE
from agentrl_cli.registry.plugins import spread_settings

FASTER = {"code-task": {"steps": "40", "lr": "0.0006", "eval": "20"}}
"""Settings of a pack under `train:` that go with LOSS_AND_SCHEDULE."""
LOSS_AND_SCHEDULE = """
algo:
  loss: cispo                       # policy loss: bounds a token's weight, and every token keeps its gradient
  minibatches: 2                    # optimizer steps of a training step

train:
  schedule: linear                  # the learning rate falls to 0: the last steps settle
"""
"""Settings with which code-task is about as good after 40 steps as with its own after 80 (benchmarks/README.md)."""


PackOption = Annotated[
    str | None,
    typer.Option(
        "--pack",
        help="The pack to learn; default: code-task. `agentrl init --list` names them.",
    ),
]


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The project's folder; made if it is missing.")
    ] = Path("demo"),
    pack: PackOption = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Training steps; default: 40 of code-task, else the pack's."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Accept the isolation that this machine offers.")
    ] = False,
) -> None:
    """Learn a tool in minutes, on a CPU and offline: agentrl init, train and eval in one command.

    The bundled model learns to run Python; its best checkpoint is then compared with the base model on tasks that it
    never saw. Run again in the same project, it resumes a training that was cut short, else trains once more.
    """
    folder = folder.expanduser()
    if (folder / PROJECT_FILE).is_file():
        refuse_idle(f"where {folder} is a project already", {"--pack": pack})
        narrate(f"{folder} is a project already.")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} exists and is not a project.", hint="Name another folder: agentrl demo DIR"
        )
    else:
        pack = pack or "code-task"
        try:
            init.command(pack, folder, yes=yes)
        except init.NotAccepted as error:
            error.hint += " From a clone: make demo WEAK=1"
            raise
        _shorten(folder / PROJECT_FILE, FASTER.get(pack, {}))
        narrate("The demo continues by itself: it trains, then evaluates.")
    _train(folder, steps)
    models, attempts = evaluate.CandidateOptions(), evaluate.AttemptOptions(samples=2)
    evaluate.command(models=models, attempts=attempts, work=WorkOptions(project=folder))
    narrate(f"\nA project with a trained agent is in {os.fspath(folder)}/. Where to look next:")
    for line, what in (
        (f"cd {shlex.quote(str(folder))}", ""),
        ("agentrl replay best", "an episode, token by token"),
        ("agentrl watch", "the curves of the run"),
        ("agentrl chat", "talk to the agent; `agentrl ls` lists every episode"),
        ("agentrl init --blank NAME", "a task of your own"),
    ):
        echo(f"  {line:27}{what}".rstrip())


def _shorten(settings: Path, changes: Mapping[str, str]) -> None:
    """Change a new project's training: in its settings, so that a demo that is cut short continues with them."""
    above, title, section = settings.read_text(encoding="utf-8").partition("\ntrain:\n")
    for key, value in changes.items():
        if line := re.search(rf"(?m)^(  {key}: )\S+ *", section):
            new = f"{line[1]}{value}".ljust(len(line[0]))
            section = section[: line.start()] + new + section[line.end() :]
    if changes:
        settings.write_text(
            above + (LOSS_AND_SCHEDULE if title else "") + section, encoding="utf-8"
        )


def _train(folder: Path, steps: int | None) -> None:
    """Train, or resume; if that fails, name the command that continues it."""
    process = train.ProcessOptions(resume=_cut_short(folder))
    sources, spread = open_project(folder).sources, spread_settings()
    if process.resume or any(sources[key] != "default" for key in spread):
        spread = {}  # else two processes sample: one keeps one core busy
    work = ModelOptions(project=folder, sets=[f"{key}={value}" for key, value in spread.items()])
    try:
        train.command(steps=steps, planned=PlanOptions(), process=process, work=work)
    except Exception as error:
        if not isinstance(error, typer.Exit) and (name := _cut_short(folder)):
            program = shutil.which("agentrl") and "agentrl"
            program = program or shlex.quote(str(Path(sys.executable).with_name("agentrl")))
            again = f"cd {shlex.quote(str(folder.resolve()))} && {program} train --resume last"
            narrate(f"The demo's training {name} was cut short. It continues with: {again}")
        raise


def _cut_short(folder: Path) -> str | None:
    """Return the name of the project's newest training if it has steps left, else None."""
    from agentrl_cli.store import Store

    db = open_project(folder).db
    if not db.is_file():
        return None
    with Store.open(db, readonly=True) as store:
        newest = next((row for row in store.runs.all() if row.kind == "train"), None)
    return None if newest is None or newest.status == "finished" else newest.name
