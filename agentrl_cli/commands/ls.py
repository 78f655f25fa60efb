"""`agentrl ls`: lists of episodes, runs, tasks, checkpoints, evaluations, tags; text search; read-only SQL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import groupby, islice
from operator import attrgetter
from typing import Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import JsonOption, echo, echo_json, echo_jsonl, narrate
from agentrl_cli.commands.options import RunStoreOptions, refuse_idle
from agentrl_cli.commands.tables import Format, print_rows
from agentrl_cli.errors import UsageError
from agentrl_cli.reports.evidence import describe_change
from agentrl_cli.store import Store
from agentrl_cli.store.queries import Hit, grep, run_query, schema
from agentrl_cli.store.rows import episode_state
from agentrl_cli.tui.common.plain_text import harmless, local_time, uses_colour

TIMEOUT = 60.0
"""Of --sql, in seconds."""
WIDTH = 160
"""Longest excerpt of a line that --grep prints, in characters."""
LEAST = ("tags", "#", "turns", "tokens", "calls", "adv", "run", "step", "flags", "pack", "model")
"""Columns that a narrow terminal does without, in this order."""


class What(StrEnum):
    """A kind of things to list."""

    episodes = "episodes"
    runs = "runs"
    tasks = "tasks"
    checkpoints = "checkpoints"
    evals = "evals"
    tags = "tags"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of --grep and --sql."""

    grep: Annotated[
        str | None, typer.Option("--grep", metavar="REGEX", help="Lines of episodes that match.")
    ] = None
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", "-i", help="With --grep: ignore case.")
    ] = False
    role: Annotated[
        str | None,
        typer.Option("--role", help="With --grep: only turns of system, user, assistant or tool."),
    ] = None
    ids: Annotated[
        bool, typer.Option("--ids", "-l", help="With --grep: only the ids of episodes that match.")
    ] = False
    sql: Annotated[
        str | None, typer.Option("--sql", metavar="SELECT", help="Run SQL; - reads it from stdin.")
    ] = None
    params: Annotated[
        list[str] | None,
        typer.Option("--param", help="With --sql: a value for each ?; repeatable."),
    ] = None
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.0, help="With --sql: seconds; 0: no limit.")
    ] = TIMEOUT
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the tables and their columns, for --sql.")
    ] = False

    def check(self, what: What, format: Format, run: str | None) -> None:
        """Raise UsageError for options that would do nothing."""
        ways = {
            "--schema": self.schema,
            "--sql": self.sql is not None,
            "--grep": self.grep is not None,
        }
        given = [name for name, passed in ways.items() if passed]
        if given:
            refuse_idle(
                f"with {given[0]}", {what: what is not What.episodes, **dict.fromkeys(given[1:], 1)}
            )
            refuse_idle(f"with {given[0]}", {"--run": run and given[0] != "--grep"})
        if given in (["--grep"], ["--schema"]):
            other = {"--format": format is not Format.table}
            refuse_idle(f"with {given[0]}; there is --json", other)
        if self.grep is None:
            refuse_idle(
                "without --grep",
                {"--role": self.role, "--ignore-case": self.ignore_case, "--ids": self.ids},
            )
        if self.sql is None:
            given_too = {"--param": bool(self.params), "--timeout": self.timeout != TIMEOUT}
            refuse_idle("without --sql", given_too)


FilterOption = Annotated[
    str,
    typer.Option(
        "--filter",
        "-f",
        help="E.g. 'reward:<0.5 flag:LOOP task:calc/* text:\"4,5\" -tag:seen'.",
        autocompletion=completion.filters,
    ),
]
SortOption = Annotated[
    str, typer.Option("--sort", "-s", help="E.g. -reward or step,-tokens; - is descending.")
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", "-n", min=0, help="Lines; 0: all. 20, --grep 100, --sql 1000."),
]


def command(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.episodes,
    filter: FilterOption = "",
    sort: SortOption = "-time",
    limit: LimitOption = None,
    format: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
    json: JsonOption = False,
    *,
    search: SearchOptions,
    where: RunStoreOptions,
) -> None:
    """List episodes (the default), runs, tasks, checkpoints, evaluations or tags; --grep and --sql search.

    Filter fields: reward primary adv step turns branches tokens model_tokens calls errors sample seed seconds (numbers:
    <0.5, 1..3, none), task pack family split outcome fact kind group parent id level error weights run tool flag tag
    note ckpt drift (names: * and ? match), text. Terms are joined by and; a comma means or; - in front negates.

    --grep searches messages and calls, the newest episodes first; exits with 1 if nothing matches. --sql only reads:
    SELECT, WITH and reading PRAGMAs; the views v_episodes, v_groups and v_turns are for people.

    --json prints a list of objects: every column of an episode or a run, else the columns of the table; with --grep
    one {"episode_id", "turn", "role", "line", "start", "end"} a line, with --ids a list of ids.

    agentrl ls --sql "select task, avg(reward) from v_episodes group by task order by 2 limit 5"
    """
    search.check(what, format, where.run)
    format = Format.json if json else format
    listed = what is What.episodes and not search.schema and search.sql is None
    if (filter and not listed) or (sort != "-time" and not (listed and search.grep is None)):
        raise UsageError("--filter and --sort apply to the list of episodes; else use --sql.")
    if search.schema:
        return _print_schema(schema(where.find()), json)
    if search.sql is not None:
        return _print_sql(where, search, 1000 if limit is None else limit, format)
    with where.open() as store:
        if search.grep is not None:
            return _print_hits(store, where, search, filter, 100 if limit is None else limit, json)
        limit = 20 if limit is None else limit
        run = where.run_id(store)
        if what is What.episodes:
            ids = store.episodes.ids(filter, sort, run)
            total, found = len(ids), list[Any](store.episodes.rows(ids[:limit] if limit else ids))
        else:
            every = _ROWS[what](store, run)
            total, found = len(every), every[:limit] if limit else every
        _print_list(store, what, found, format)
    if total > len(found):
        narrate(f"{len(found)} of {total:,}; --limit 0 prints all.")
    elif not total:
        narrate("Nothing matches.")


def _print_list(store: Store, what: What, found: list[Any], format: Format) -> None:
    """Print rows: all their columns as JSON, else those that people read."""
    for run in found if what is What.runs else ():
        for text in store.journal.waits(run.id)[:1] if run.alive else ():
            narrate(f"{run.name} waits for {text}")
        for change in store.journal.healed(run.id):
            narrate(f"{run.name}: {describe_change(change)}")
    if format in (Format.json, Format.jsonl) and what in (What.episodes, What.runs):
        rows = [{item.name: getattr(row, item.name) for item in fields(row)} for row in found]
        if what is What.runs:
            rows = [
                {"name": run.name}
                | row
                | {"status": run.state, "of": run.total_steps}
                | {"healed": store.journal.healed(run.id)}
                for row, run in zip(rows, found, strict=True)
            ]
        print_rows(list(rows[0]) if rows else [], [list(row.values()) for row in rows], format)
        return
    heads = _HEADS[what].split()
    if what is What.episodes:
        found = list(_episode_lines(store, found))
    elif what is What.runs:
        found = [
            [r.name, r.kind, r.state, r.step, r.total_steps, r.model, r.pack, local_time(r.started), r.id]
            for r in found
        ]  # fmt: skip
    print_rows(heads, found, format, least=LEAST)


def _episode_lines(store: Store, rows: list[Any]) -> Iterator[list[Any]]:
    runs = {item.id: item for item in store.runs.all()}
    for row in rows:
        run = runs.get(row.run_id or "")
        head = [row.id, run.name if run else "-", row.step, row.task_id, row.sample]
        yield [*head, episode_state(row, run), row.reward, row.advantage, row.n_turns, row.n_tokens,
               row.n_calls, " ".join(row.flags), " ".join(row.tags)]  # fmt: skip


def _checkpoints(store: Store, run: str | None) -> list[list[Any]]:
    return [
        [item.name, row.step, row.kind, row.path, local_time(row.at)]
        for item in store.runs.all()
        if run in (None, item.id)
        for row in store.runs.checkpoints(item.id)
    ]


def _evals(store: Store, run: str | None) -> list[list[Any]]:
    every = {None: "-"} | {item.id: item.name for item in store.runs.all()}
    columns = attrgetter(
        "step", "name", "split", "n_tasks", "n_samples", "pass_rate", "low", "high"
    )
    return [
        [name, *columns(row), local_time(row.at)]
        for run_id, name in every.items()
        if run in (None, run_id)
        for row in store.runs.evals(run_id)
    ]


_ROWS: dict[What, Callable[[Store, str | None], list[Any]]] = {
    What.runs: lambda store, run: [row for row in store.runs.all() if run in (None, row.id)],
    What.tasks: lambda store, run: store.stats.tasks(run),
    What.checkpoints: _checkpoints,
    What.evals: _evals,
    What.tags: lambda store, run: [list(item) for item in store.stats.tags(run).items()],
}
_HEADS = {
    What.episodes: "id run step task # outcome reward adv turns tokens calls flags tags",
    What.runs: "name kind status step of model pack started id",
    What.tasks: "task pack family split episodes reward solved",
    What.checkpoints: "run step kind path saved",
    What.evals: "run step name split tasks samples pass@1 low high at",
    What.tags: "tag episodes",
}


def _print_hits(
    store: Store, where: RunStoreOptions, search: SearchOptions, filter: str, limit: int, json: bool
) -> None:
    """Print the lines that match, as they are found."""
    run, count = where.run_id(store), 0
    hits = grep(store, search.grep or "", filter=filter, run=run, role=search.role,
                ignore_case=search.ignore_case)  # fmt: skip
    if search.ids:  # an episode's hits are consecutive
        ids = (id for id, _ in groupby(hits, attrgetter("episode_id")))
        found = list(islice(ids, limit or None))
        count = len(found)
        if json or found:
            echo_json(found) if json else echo("\n".join(found))
    else:
        for count, hit in enumerate(islice(hits, limit or None), 1):  # noqa: B007
            echo_jsonl([hit]) if json else echo(_excerpt(hit), painted=uses_colour())
    if not count:
        narrate("Nothing matches.")
        raise typer.Exit(1)
    if limit and count == limit:
        narrate(f"The first {limit}; --limit 0 prints all.")


def _excerpt(hit: Hit) -> str:
    start = max(0, min(hit.start - 40, len(hit.line) - WIDTH))
    line = hit.line[start : start + WIDTH]
    if uses_colour():
        a, b = hit.start - start, min(hit.end - start, WIDTH)
        line = f"{harmless(line[:a])}\x1b[1;31m{harmless(line[a:b])}\x1b[0m{harmless(line[b:])}"
    return f"{hit.episode_id}@t{hit.turn} {hit.role}: {'…' if start else ''}{line}"


def _print_sql(where: RunStoreOptions, search: SearchOptions, limit: int, format: Format) -> None:
    try:
        sql = sys.stdin.read() if search.sql == "-" else search.sql or ""
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The SQL on stdin is not UTF-8: {error.reason} at byte {error.start}."
        ) from error
    given = search.params or ()
    names, rows = run_query(where.find(), sql, given, timeout=search.timeout or None)
    found = list(islice(rows, limit + 1 if limit else None))
    shown = found[:limit] if limit else found
    print_rows(
        names,
        [[f"<{len(v)} bytes>" if isinstance(v, bytes) else v for v in row] for row in shown],
        format,
    )
    if len(found) > len(shown):
        narrate(f"The first {limit}; --limit 0 prints all.")


def _print_schema(tables: Iterable[tuple[str, str, list[tuple[str, str]]]], json: bool) -> None:
    if json:
        return echo_json({name: dict(columns) for _, name, columns in tables})
    for kind, name, columns in tables:
        echo(f"{kind} {name}: {', '.join(column for column, _ in columns)}")
