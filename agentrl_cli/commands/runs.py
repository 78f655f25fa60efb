"""`agentrl runs`: list, rename and delete runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    YesOption,
    confirm,
    echo_json,
    narrate,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.tables import clock, print_rows
from agentrl_cli.errors import UsageError

app = typer.Typer(name="runs", help="List, rename, delete runs.", no_args_is_help=False)

RunArgument = Annotated[
    str,
    typer.Argument(
        help="A run by name, id or unique prefix; `last`.", autocompletion=completion.runs
    ),
]
NameArgument = Annotated[str, typer.Argument(help="The new name; it must not be taken.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """List the runs of the store, the newest first."""
    if context.invoked_subcommand is None:
        list_runs(json, project, db)


@app.command("list")
def list_runs(json: JsonOption = False, project: ProjectOption = None, db: DbOption = None) -> None:
    """List the runs, the newest first. --json prints every column, the configuration included."""
    from agentrl_cli.store import Store

    with Store.open(find_db(project, db), readonly=True) as store:
        runs = store.runs.all()
    if json:
        echo_json(runs)
        return
    names = ["name", "kind", "status", "step", "of", "model", "pack", "started"]
    rows = [
        [r.name, r.kind, r.state, r.step, r.total_steps, r.model, r.pack, clock(r.started)]
        for r in runs
    ]
    print_rows(names, rows, least=["pack", "model"])
    if not runs:
        narrate("No runs yet.")


@app.command()
def rename(
    run: RunArgument,
    name: NameArgument,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Rename a run. Its folder keeps the old name. --json prints {"id", "name", "before"}."""
    from agentrl_cli.store import Store

    with Store.open(find_db(project, db)) as store:
        found = store.runs.get(run)
        if any(other.name == name for other in store.runs.all()):
            raise UsageError(
                f"A run {name!r} exists already.", hint="Names are unique within a store."
            )
        store.runs.update(found.id, name=name)
    if json:
        echo_json({"id": found.id, "name": name, "before": found.name})
    else:
        narrate(f"{found.name} is now {name}.")


@app.command()
def delete(
    runs: Annotated[
        list[str],
        typer.Argument(help="Runs by name, id or unique prefix.", autocompletion=completion.runs),
    ],
    yes: YesOption = False,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Leave checkpoints and logs on disk.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if the run is running.")] = False,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Delete runs with all their episodes, checkpoints and logs, after asking. --json prints [{"run", "episodes"}]."""
    from agentrl_cli.store import Store
    from agentrl_cli.store.maintenance import delete_run, run_folder

    done = []
    with Store.open(find_db(project, db)) as store:
        found = {item.id: item for item in map(store.runs.get, runs)}
        for item in found.values():
            if item.held and not force:
                raise UsageError(
                    f"{item.name} is running (process {item.pid}).",
                    hint="Stop it first, or use --force.",
                )
            folder = run_folder(store.path, item) if not keep_files else None
            count = len(store.episodes.ids(run=item.id))
            if item.dir and folder is None and not keep_files and Path(item.dir).is_dir():
                narrate(
                    f"The folder {item.dir} is kept: it is not beside this store, or another store uses it."
                )
            what = f"{item.name}: {count:,} episodes, {item.step} steps" + (
                f", and the folder {folder}" if folder else ""
            )
            if not confirm(f"Delete {what}?", yes=yes):
                narrate(
                    f"{item.name} was kept."
                    + ("" if yes else " Without a terminal, --yes confirms.")
                )
                continue
            delete_run(store, item, keep_files=keep_files, force=force)
            done.append({"run": item.name, "episodes": count})
            narrate(f"Deleted {what}. `agentrl db vacuum` frees the space in the store.")
    if json:
        echo_json(done)
    elif not done:
        raise typer.Exit(1)
