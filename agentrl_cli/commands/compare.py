"""`agentrl compare`: two runs beside each other, task by task."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    echo,
    echo_json,
    narrate,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.tables import aligned, cell, fitting
from agentrl_cli.errors import UsageError

if TYPE_CHECKING:
    from agentrl_cli.reports.compare import RunComparison
    from agentrl_cli.store import EvalRow

MOST = 22
"""Characters of a setting's value on a terminal."""


def command(
    before: Annotated[
        str,
        typer.Argument(help="A run: name, id or unique prefix.", autocompletion=completion.runs),
    ],
    after: Annotated[
        str,
        typer.Argument(help="The run to compare it with; `last`.", autocompletion=completion.runs),
    ] = "last",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Tasks to print, flipped ones first.")
    ] = 30,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Compare two runs: metrics of the last ten steps, settings that differ, evaluations, tasks gained and lost.

    Without the second run the newest one is taken. The tables call the first run A and the second B.
    Tasks are taken from the newest evaluation of each run if both have one, else from all their attempts. A task
    counts as solved if more than half of its attempts are.

    JSON: {"before", "after", "metrics": {name: {"before", "after"}}, "settings", "evals", "difference", "p_value",
    "gained", "lost", "tasks": [{"task_id", "flip", "before": [solved, attempts], …}]}
    """
    from agentrl_cli.reports.compare import compare_runs
    from agentrl_cli.store import Store

    with Store.open(find_db(project, db), readonly=True) as store:
        found = compare_runs(store, before, after)
    if found.before.id == found.after.id:
        name = found.before.name
        raise UsageError(
            f"{name} would be compared with itself.", hint="Name two runs: agentrl runs list."
        )
    if json:
        echo_json(found.report())
    else:
        _print(found, limit)


def _print(found: RunComparison, limit: int) -> None:
    one, two = "A", "B"
    echo(f"A  {found.before.name}\nB  {found.after.name}\n")
    if settings := [
        line for line in found.settings if not any(isinstance(value, dict) for value in line[1:])
    ]:
        _table(["setting", one, two], [[name, _short(a), _short(b)] for name, a, b in settings])
    if found.metrics:
        _table(
            [f"mean of the last {10} steps", one, two],
            [[name, a, b] for name, a, b in found.metrics],
        )
    if found.evals:
        _table(
            ["evaluation", one, two],
            [[name, _interval(a), _interval(b)] for name, a, b in found.evals],
        )
    if found.difference is None:
        narrate("The runs have no attempted task in common.")
        return
    value, low, high = found.difference
    echo(
        f"{len(found.tasks)} tasks attempted by both ({found.source}): difference in the share solved"
        f" {value:+.3f} [{low:+.3f}, {high:+.3f}]; {found.gained} gained, {found.lost} lost,"
        f" McNemar's exact test p = {found.p_value:.3g}"
    )
    echo()
    rows = [
        [
            line.flip,
            line.task_id,
            f"{line.before[0]}/{line.before[1]}",
            f"{line.after[0]}/{line.after[1]}",
            line.reward_before,
            line.reward_after,
            line.episode_before,
            line.episode_after,
        ]
        for line in found.tasks[:limit]
    ]
    heads = [
        "flip",
        "task",
        one,
        two,
        f"reward {one}",
        f"reward {two}",
        f"replay {one}",
        f"replay {two}",
    ]
    dropped: list[str] = []
    if sys.stdout.isatty():
        places, dropped = fitting(
            heads, rows, ("reward A", "reward B", "replay A"), shutil.get_terminal_size().columns
        )
        heads, rows = [heads[n] for n in places], [[row[n] for n in places] for row in rows]
    _table(heads, rows)
    if dropped:
        narrate(f"Left out for want of width: {', '.join(dropped)}.")
    if len(rows) < len(found.tasks):
        narrate(f"{len(rows)} of {len(found.tasks)} tasks; --limit prints more, --json all.")


def _table(names: list[str], rows: list[list[object]]) -> None:
    for line in aligned(names, rows):
        echo(line, painted=True)
    echo()


def _short(value: object) -> str:
    """Return a setting's value, cut where a person reads it."""
    text = cell(value)
    return f"{text[:MOST]}…" if len(text) > MOST and sys.stdout.isatty() else text


def _interval(row: EvalRow | None) -> str:
    if row is None or row.pass_rate is None:
        return "-"
    between = (
        f" [{row.low:.3f}, {row.high:.3f}]" if row.low is not None and row.high is not None else ""
    )
    where = row.name.rpartition("@")[2]
    return f"{row.pass_rate:.3f}{between} @{where}"
