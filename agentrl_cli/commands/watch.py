"""`agentrl watch`: the dashboard of a training. It only reads the store, so it can be closed at any time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import JsonOption, echo, echo_jsonl, is_terminal, narrate
from agentrl_cli.commands.options import StoreOptions

POLL = 1.0


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run: name, id, unique prefix, or last; default: the newest training.",
            autocompletion=completion.runs,
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="One line per step instead of the screen.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --plain: print the steps so far and exit.")
    ] = False,
    as_json: JsonOption = False,
    *,
    where: StoreOptions,
) -> None:
    """Watch a training: curves, groups, running episodes, log. `q` leaves it running; finished runs open too.

    Without a run it shows the newest training, and the next one as soon as that begins.
    """
    follow = run in (None, "last")
    with where.open() as store:
        trainings = (row.id for row in store.runs.all() if follow and row.kind == "train")
        run_id = next(trainings, "") or store.runs.get(run or "last").id
    watch_run(where.find(), run_id, plain=plain, as_json=as_json, once=once, follow=follow)


def watch_run(
    path: Path,
    run_id: str,
    *,
    plain: bool = False,
    as_json: bool = False,
    once: bool = False,
    follow: bool = False,
) -> None:
    """Open the dashboard of a run, or print a line per step without a terminal."""
    if plain or as_json or once or not is_terminal():
        return _print_steps(path, run_id, as_json=as_json, once=once)
    from agentrl_cli.tui.app import watch

    watch(path, run_id, follow=follow)


def _print_steps(path: Path, run_id: str, *, as_json: bool, once: bool) -> None:
    """Print one line per finished step until the run ends."""
    from agentrl_cli.store import Store
    from agentrl_cli.tui.watch.panels import step_line

    since = 0
    with Store.open(path, readonly=True) as store:
        while True:
            run = store.runs.get(run_id)  # before the steps: its last writes are not missed
            for row in store.runs.steps(run_id, since):
                since = int(row["step"]) + 1
                echo_jsonl([row]) if as_json else echo(step_line(row))
            if once or not run.alive:
                break
            time.sleep(POLL)
        narrate(f"run {run.name}: {store.runs.get(run_id).state}")
