"""`agentrl query`: read-only SQL on the store."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    echo,
    echo_json,
    narrate,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.tables import Format, print_rows
from agentrl_cli.errors import UsageError


def command(
    sql: Annotated[str | None, typer.Argument(help="A SELECT; - reads it from stdin.")] = None,
    params: Annotated[
        list[str] | None, typer.Option("--param", help="A value for each ?; repeatable.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="At most this many rows; 0: all.")
    ] = 1000,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.0, help="Seconds; 0: no limit.")
    ] = 60.0,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the tables and their columns.")
    ] = False,
    format: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Run read-only SQL: SELECT, WITH and reading PRAGMAs. The views v_episodes, v_groups and v_turns are for people.

    --json prints a list of objects by column name.

    agentrl query "select task, avg(reward) from v_episodes group by task order by 2 limit 5"
    """
    from agentrl_cli.store.queries import run_query
    from agentrl_cli.store.queries import schema as tables

    path = find_db(project, db)
    if schema:
        found = tables(path)
        if json:
            echo_json({name: dict(columns) for _, name, columns in found})
            return
        for kind, name, columns in found:
            echo(f"{kind} {name}: {', '.join(column for column, _ in columns)}")
        return
    if sql is None:
        raise UsageError(
            "No SQL given.", hint="For example: agentrl query 'select * from v_groups limit 5'"
        )
    names, rows = run_query(
        path, _stdin() if sql == "-" else sql, params or (), timeout=timeout or None
    )
    shown: list[list[Any]] = []
    more = False
    for row in rows:
        if limit and len(shown) == limit:
            more = True
            break
        shown.append(
            [f"<{len(value)} bytes>" if isinstance(value, bytes) else value for value in row]
        )
    print_rows(names, shown, Format.json if json else format)
    if more:
        narrate(f"The first {limit}; --limit 0 prints all.")


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The SQL on stdin is not UTF-8: {error.reason} at byte {error.start}."
        ) from error
