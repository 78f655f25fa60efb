"""`agentrl db`: the store as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    RunOption,
    YesOption,
    confirm,
    echo,
    echo_json,
    narrate,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.tables import print_rows, size
from agentrl_cli.errors import StoreError, UsageError

app = typer.Typer(
    name="db", help="The store: path, status, backup, prune, vacuum.", no_args_is_help=True
)


@app.command("path")
def path_(json: JsonOption = False, project: ProjectOption = None, db: DbOption = None) -> None:
    """Print the path of the store, also if it does not exist yet."""
    path = find_db(project, db, must_exist=False)
    if json:
        echo_json({"path": path, "exists": path.is_file()})
    else:
        echo(str(path))


@app.command()
def status(
    check: Annotated[
        bool, typer.Option("--check", help="Also check for damage; reads the whole file.")
    ] = False,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Print sizes, counts and the version. --json prints {"path", "bytes", "rows": {"episodes": 12, …}, …}."""
    from agentrl_cli.store.maintenance import status as look

    found = look(find_db(project, db), check=check)
    if json:
        echo_json(found)
    else:
        dead = f", {found.interrupted} interrupted" if found.interrupted else ""
        free = f", {size(found.free_bytes)} of it free" if found.free_bytes else ""
        echo(
            f"{found.path}   {size(found.bytes)}{free}   log {size(found.wal_bytes)}   schema {found.schema}"
        )
        echo(
            f"arrays per token about {size(found.token_bytes)}   {found.running} episodes running{dead}"
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
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Copy the store, compacted; a training may keep running. --json prints {"path", "bytes"}."""
    from agentrl_cli.store.maintenance import backup as copy

    count = copy(find_db(project, db), target)
    if json:
        echo_json({"path": target, "bytes": count})
    else:
        narrate(f"{target}: {size(count)}.")


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
    filter: Annotated[
        str, typer.Option("--filter", "-f", help="Only these; as in `agentrl ls`.")
    ] = "",
    run: RunOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print how many.")] = False,
    yes: YesOption = False,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Drop old episodes' per-token data, after asking: halve the precision, drop alternatives, numbers, or all.

    --json prints {"what", "episodes", "done"}.
    """
    from agentrl_cli.store import Store
    from agentrl_cli.store.maintenance import WHAT, prunable
    from agentrl_cli.store.maintenance import prune as drop

    if what not in WHAT:
        raise UsageError(f"Unknown --what {what!r}.", hint=f"Choose from: {', '.join(WHAT)}.")
    days = None if older_than is None else _days(older_than)
    words = [word.strip() for word in keep.split(",") if word.strip()]
    with Store.open(find_db(project, db)) as store:
        ids = prunable(
            store,
            older_days=days,
            keep=words,
            filter=filter,
            run=store.runs.get(run).id if run else None,
        )
        question = f"{WHAT[what].capitalize()}: {len(ids):,} episodes. Continue?"
        done = bool(ids) and not dry_run and confirm(question, yes=yes)
        if done:
            drop(store, ids, what)
    if json:
        echo_json({"what": what, "episodes": len(ids), "done": done})
    elif done:
        narrate(f"{len(ids):,} episodes pruned. `agentrl db vacuum` frees the space.")
    else:
        narrate(
            f"{len(ids):,} episodes would be pruned ({WHAT[what]})."
            + ("" if dry_run else " Nothing was changed.")
        )


@app.command()
def vacuum(json: JsonOption = False, project: ProjectOption = None, db: DbOption = None) -> None:
    """Return unused space to the disk; nothing may write meanwhile. --json prints {"before", "after"}."""
    from agentrl_cli.store.maintenance import vacuum as shrink

    before, after = shrink(find_db(project, db))
    if json:
        echo_json({"before": before, "after": after})
    else:
        narrate(f"{size(before)} → {size(after)}.")


def _days(text: str) -> float:
    units = {"d": 1.0, "h": 1 / 24, "w": 7.0}
    try:
        return float(text.rstrip("dhw")) * units[text[-1:] if text[-1:] in units else "d"]
    except ValueError:
        raise UsageError(f"--older-than needs a time like 7d or 12h, not {text!r}.") from None
