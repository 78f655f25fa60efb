"""`agentrl db`: the store as a file, and its runs renamed and deleted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    JsonOption,
    YesOption,
    answer,
    confirm,
    echo,
    echo_json,
    narrate,
)
from agentrl_cli.commands.options import FilterOption, RunStoreOptions, StoreOptions
from agentrl_cli.commands.tables import print_rows
from agentrl_cli.errors import StoreError, UsageError, pluralise
from agentrl_cli.tui.common.plain_text import byte_size

app = typer.Typer(
    name="db",
    help="The store: status, backup, prune, vacuum; rename and delete runs.",
    no_args_is_help=True,
)


@app.command("path")
def path_(json: JsonOption = False, *, where: StoreOptions) -> None:
    """Print the path of the store, also if it does not exist yet."""
    path = where.find(must_exist=False)
    echo_json({"path": path, "exists": path.is_file()}) if json else echo(str(path))


@app.command()
def status(
    check: Annotated[
        bool, typer.Option("--check", help="Also check for damage; reads the whole file.")
    ] = False,
    json: JsonOption = False,
    *,
    where: StoreOptions,
) -> None:
    """Print sizes, counts and the version. --json prints {"path", "bytes", "rows": {"episodes": 12, …}, …}."""
    from agentrl_cli.store import maintenance

    found = maintenance.status(where.find(), check=check)
    if json:
        echo_json(found)
    else:
        dead = f", {found.interrupted} interrupted" if found.interrupted else ""
        free = f", {byte_size(found.free_bytes)} of it free" if found.free_bytes else ""
        echo(
            f"{found.path}   {byte_size(found.bytes)}{free}   log {byte_size(found.wal_bytes)}   schema {found.schema}"
        )
        echo(
            f"arrays per token about {byte_size(found.token_bytes)}"
            f"   {pluralise(found.running, 'episode')} running{dead}"
        )
        print_rows(
            ["table", "rows"], [[name, count] for name, count in found.rows.items() if count]
        )
        if found.check:
            echo(f"check: {found.check}")
    if found.check not in ("", "ok"):
        raise StoreError(
            f"The store is damaged: {found.check}.",
            hint="`agentrl db backup copy.db` saves the rest.",
        )


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="The new file.")],
    json: JsonOption = False,
    *,
    where: StoreOptions,
) -> None:
    """Copy the store, compacted; a training may keep running. --json prints {"path", "bytes"}."""
    from agentrl_cli.store import maintenance

    count = maintenance.backup(where.find(), target)
    answer(json, {"path": target, "bytes": count}, f"{target}: {byte_size(count)}.")


@app.command()
def prune(
    what: Annotated[
        str,
        typer.Option(
            "--what", help="half | alternatives | numbers | episodes: drop least to most."
        ),
    ] = "numbers",
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Only older ones: 7d, 12h.")
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            help="Keep these: best,worst,flagged,tagged,noted,eval; an empty text keeps none.",
        ),
    ] = "best,worst,tagged,noted",
    filter: FilterOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print how many.")] = False,
    yes: YesOption = False,
    json: JsonOption = False,
    *,
    where: RunStoreOptions,
) -> None:
    """Drop old episodes' per-token data, after asking: halve the precision, drop alternatives, numbers, or all.

    Those that a training, or its resume, is to train on stay. --json prints {"what", "episodes", "done"}.
    """
    from agentrl_cli.store import maintenance

    if what not in maintenance.WHAT:
        raise UsageError(
            f"Unknown --what {what!r}.", hint=f"Choose from: {', '.join(maintenance.WHAT)}."
        )
    days = None if older_than is None else _days(older_than)
    words = [word.strip() for word in keep.split(",") if word.strip()]
    with where.open(readonly=False) as store:
        run = where.run_id(store)
        ids = maintenance.prunable(store, older_days=days, keep=words, filter=filter, run=run)
        question = (
            f"{maintenance.WHAT[what].capitalize()}: {pluralise(len(ids), 'episode')}. Continue?"
        )
        done = bool(ids) and not dry_run and confirm(question, yes=yes)
        if done:
            maintenance.prune(store, ids, what)
    text = f"{pluralise(len(ids), 'episode')} pruned. `agentrl db vacuum` frees the space."
    if not done:
        text = f"{pluralise(len(ids), 'episode')} would be pruned ({maintenance.WHAT[what]})."
        text += "" if dry_run else " Nothing was changed."
    answer(json, {"what": what, "episodes": len(ids), "done": done}, text)


@app.command()
def vacuum(json: JsonOption = False, *, where: StoreOptions) -> None:
    """Return unused space to the disk; nothing may write meanwhile. --json prints {"before", "after"}."""
    from agentrl_cli.store import maintenance

    before, after = maintenance.vacuum(where.find())
    sizes = {"before": before, "after": after}
    answer(json, sizes, f"{byte_size(before)} → {byte_size(after)}.")


@app.command()
def rename(
    run: Annotated[
        str,
        typer.Argument(
            help="A run by name, id or unique prefix; `last`.", autocompletion=completion.runs
        ),
    ],
    name: Annotated[str, typer.Argument(help="The new name; it must not be taken.")],
    json: JsonOption = False,
    *,
    where: StoreOptions,
) -> None:
    """Rename a run. Its folder keeps the old name. --json prints {"id", "name", "before"}."""
    with where.open(readonly=False) as store:
        found = store.runs.get(run)
        store.runs.rename(found.id, name)
    renamed = {"id": found.id, "name": name, "before": found.name}
    answer(json, renamed, f"{found.name} is now {name}.")


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
    *,
    where: StoreOptions,
) -> None:
    """Delete runs with all their episodes, checkpoints and logs, after asking. --json prints [{"run", "episodes"}]."""
    from agentrl_cli.store import maintenance

    done = []
    with where.open(readonly=False) as store:
        found = {item.id: item for item in map(store.runs.get, runs)}
        for item in found.values():
            if item.held and not force:
                raise UsageError(
                    f"{item.name} is running (process {item.pid}).",
                    hint="Stop it first, or use --force.",
                )
            folder = maintenance.run_folder(store.path, item) if not keep_files else None
            count = len(store.episodes.ids(run=item.id))
            if item.dir and folder is None and not keep_files and Path(item.dir).is_dir():
                narrate(
                    f"The folder {item.dir} is kept: it is not beside this store, or another store uses it."
                )
            what = f"{item.name}: {pluralise(count, 'episode')}, {pluralise(item.step, 'step')}"
            what += f", and the folder {folder}" if folder else ""
            if not confirm(f"Delete {what}?", yes=yes):
                hint = "" if yes else " Without a terminal, --yes confirms."
                narrate(f"{item.name} was kept.{hint}")
                continue
            maintenance.delete_run(store, item, keep_files=keep_files, force=force)
            done.append({"run": item.name, "episodes": count})
            narrate(f"Deleted {what}. `agentrl db vacuum` frees the space in the store.")
    if json:
        echo_json(done)
    elif not done:
        raise typer.Exit(1)


def _days(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([dhw]?)", text)
    if found is None:
        raise UsageError(f"--older-than needs a time like 7d or 12h, not {text!r}.")
    return float(found[1]) * {"h": 1 / 24, "w": 7.0}.get(found[2], 1.0)
