"""`agentrl ls`: lists of episodes, runs, tasks, checkpoints, evaluations, tags."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import DbOption, JsonOption, ProjectOption, RunOption, narrate
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.tables import Format, clock, print_rows

if TYPE_CHECKING:
    from agentrl_cli.store import EpisodeRow, RunRow, Store

Rows = tuple[list[str], list[list[Any]]]


class What(StrEnum):
    """What to list."""

    episodes = "episodes"
    runs = "runs"
    tasks = "tasks"
    checkpoints = "checkpoints"
    evals = "evals"
    tags = "tags"


LEAST = ("tags", "#", "turns", "tokens", "calls", "adv", "run", "step", "flags")
"""Columns of episodes that a narrow terminal does without, in this order."""


def command(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.episodes,
    filter: Annotated[
        str,
        typer.Option(
            "--filter",
            "-f",
            help="E.g. 'reward:<0.5 flag:LOOP task:calc/* text:\"4,5\" -tag:seen'.",
            autocompletion=completion.filters,
        ),
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", "-s", help="E.g. -reward or step,-tokens; - is descending.")
    ] = "-time",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="At most this many lines; 0: all.")
    ] = 20,
    run: RunOption = None,
    format: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """List episodes (the default), runs, tasks, checkpoints, evaluations or tags.

    Filter fields: reward primary adv step turns branches tokens model_tokens calls errors sample seed seconds (numbers:
    <0.5, 1..3, none), task pack family split outcome fact kind group parent id level error weights run tool flag tag
    note ckpt drift (names: * and ? match), text. Terms are joined by and; a comma means or; - in front negates.

    --json prints [{"id", "run_id", "task_id", "reward", "outcome", "flags", …}] with every column of an episode.
    """
    from agentrl_cli.store import Store

    with Store.open(find_db(project, db), readonly=True) as store:
        run_id = store.runs.get(run).id if run else None
        if what is What.episodes:
            _episodes(store, filter, sort, limit, run_id, Format.json if json else format)
            return
        names, rows = _LISTS[what](store, run_id)
        shown = rows[:limit] if limit else rows
        print_rows(names, shown, Format.json if json else format)
        _say_rest(len(rows), len(shown))


def _episodes(
    store: Store, filter: str, sort: str, limit: int, run: str | None, format: Format
) -> None:
    ids = store.episodes.ids(filter, sort, run)
    rows = store.episodes.rows(ids[:limit] if limit else ids)
    if format in (Format.json, Format.jsonl):
        from dataclasses import fields

        names = [item.name for item in fields(rows[0])] if rows else []
        print_rows(names, [[getattr(row, name) for name in names] for row in rows], format)
    else:
        runs = {item.id: item for item in store.runs.all()}
        heads = [
            "id",
            "run",
            "step",
            "task",
            "#",
            "outcome",
            "reward",
            "adv",
            "turns",
            "tokens",
            "calls",
            "flags",
            "tags",
        ]
        print_rows(heads, [_line(row, runs) for row in rows], format, least=LEAST)
    _say_rest(len(ids), len(rows))


def _line(row: EpisodeRow, runs: dict[str, RunRow]) -> list[Any]:
    from agentrl_cli.store.rows import episode_state

    run = runs.get(row.run_id or "")
    return [
        row.id,
        run.name if run else "-",
        row.step,
        row.task_id,
        row.sample,
        episode_state(row, run),
        row.reward,
        row.advantage,
        row.n_turns,
        row.n_tokens,
        row.n_calls,
        " ".join(row.flags),
        " ".join(row.tags),
    ]


def _runs(store: Store, run: str | None) -> Rows:
    names = ["name", "kind", "status", "step", "of", "model", "pack", "started", "id"]
    return names, [
        [
            row.name,
            row.kind,
            row.state,
            row.step,
            row.total_steps,
            row.model,
            row.pack,
            clock(row.started),
            row.id,
        ]
        for row in store.runs.all()
        if run in (None, row.id)
    ]


def _tasks(store: Store, run: str | None) -> Rows:
    return ["task", "pack", "family", "split", "episodes", "reward", "solved"], store.stats.tasks(
        run
    )


def _checkpoints(store: Store, run: str | None) -> Rows:
    rows = [
        [item.name, row.step, row.kind, row.path, clock(row.at)]
        for item in store.runs.all()
        if run in (None, item.id)
        for row in store.runs.checkpoints(item.id)
    ]
    return ["run", "step", "kind", "path", "saved"], rows


def _evals(store: Store, run: str | None) -> Rows:
    every = {None: "-"} | {item.id: item.name for item in store.runs.all()}
    rows = [
        [
            name,
            row.step,
            row.name,
            row.split,
            row.n_tasks,
            row.n_samples,
            row.pass_rate,
            row.low,
            row.high,
            clock(row.at),
        ]
        for run_id, name in every.items()
        if run in (None, run_id)
        for row in store.runs.evals(run_id)
    ]
    return ["run", "step", "name", "split", "tasks", "samples", "pass@1", "low", "high", "at"], rows


def _tags(store: Store, run: str | None) -> Rows:
    return ["tag", "episodes"], [list(item) for item in store.stats.tags(run).items()]


_LISTS = {
    What.runs: _runs,
    What.tasks: _tasks,
    What.checkpoints: _checkpoints,
    What.evals: _evals,
    What.tags: _tags,
}


def _say_rest(total: int, shown: int) -> None:
    if total > shown:
        narrate(f"{shown} of {total:,}; --limit 0 prints all.")
    elif not total:
        narrate("Nothing matches.")
