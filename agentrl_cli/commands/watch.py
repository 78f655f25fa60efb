"""`agentrl watch`: the dashboard of a training. It only reads the store, so it can be closed at any time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    echo,
    echo_jsonl,
    is_terminal,
    narrate,
)
from agentrl_cli.commands.place import find_db

POLL = 1.0


def command(
    run: Annotated[
        str,
        typer.Argument(
            help="A run: name, id, unique prefix, or last.", autocompletion=completion.runs
        ),
    ] = "last",
    plain: Annotated[
        bool, typer.Option("--plain", help="One line per step instead of the screen.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --plain: print the steps so far and exit.")
    ] = False,
    project: ProjectOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a training: curves, groups, running episodes, log. `q` leaves it running; finished runs open too.

    Without a run it shows the newest training, and the next one as soon as that begins.
    """
    path = find_db(project, db)
    from agentrl_cli.store import Store

    with Store.open(path, readonly=True) as store:
        trainings = (
            [row.id for row in store.runs.all() if row.kind == "train"] if run == "last" else []
        )
        run_id = trainings[0] if trainings else store.runs.get(run).id
    if plain or as_json or once or not is_terminal():
        _follow(path, run_id, as_json=as_json, once=once)
        return
    from agentrl_cli.tui.app import watch

    watch(path, run_id, follow=run == "last")


def _follow(path: Path, run_id: str, *, as_json: bool, once: bool) -> None:
    """One line per finished step until the run ends."""
    from agentrl_cli.store import Store
    from agentrl_cli.tui.watch.panels import step_line

    since = 0
    with Store.open(path, readonly=True) as store:
        while True:
            alive = store.runs.get(
                run_id
            ).alive  # before the steps, so that the run's last writes are not missed
            for row in store.runs.steps(run_id, since):
                since = int(row["step"]) + 1
                if as_json:
                    echo_jsonl([row])
                else:
                    echo(step_line(row))
            if once or not alive:
                break
            time.sleep(POLL)
        narrate(f"run {store.runs.get(run_id).name}: {store.runs.get(run_id).state}")
