"""`agentrl grep`: search the text of episodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    RunOption,
    echo,
    echo_json,
    echo_jsonl,
    harmless,
    narrate,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.tables import coloured

if TYPE_CHECKING:
    from agentrl_cli.store.queries import Hit

WIDTH = 160
"""Longest excerpt of a line that is printed, in characters."""


def command(
    pattern: Annotated[str, typer.Argument(help="A regular expression (Python's).")],
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="Ignore case.")] = False,
    role: Annotated[
        str | None, typer.Option("--role", help="Only turns of system, user, assistant or tool.")
    ] = None,
    filter: Annotated[
        str, typer.Option("--filter", "-f", help="Only these episodes; as in `agentrl ls`.")
    ] = "",
    run: RunOption = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="At most this many lines; 0: all.")
    ] = 100,
    ids: Annotated[
        bool, typer.Option("--ids", "-l", help="Only the ids of episodes that match.")
    ] = False,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Search messages and calls, the newest episodes first; exits with 1 if nothing matches.

    --json prints one {"episode_id", "turn", "role", "line", "start", "end"} a line; with --ids one list of ids.
    """
    from agentrl_cli.store import Store
    from agentrl_cli.store.queries import grep

    def shown(hit: Hit) -> str:
        start = max(0, min(hit.start - 40, len(hit.line) - WIDTH))
        line = hit.line[start : start + WIDTH]
        if coloured():
            a, b = hit.start - start, min(hit.end - start, WIDTH)
            line = f"{harmless(line[:a])}\x1b[1;31m{harmless(line[a:b])}\x1b[0m{harmless(line[b:])}"
        return f"{hit.episode_id}@t{hit.turn} {hit.role}: {'…' if start else ''}{line}"

    count = 0
    with Store.open(find_db(project, db), readonly=True) as store:
        run_id = store.runs.get(run).id if run else None
        hits = grep(store, pattern, filter=filter, run=run_id, role=role, ignore_case=ignore_case)
        if ids:
            found = list(islice(_episodes(hits), limit or None))
            count = len(found)
            if json:
                echo_json(found)
            else:
                for item in found:
                    echo(item)
        else:
            for hit in islice(hits, limit or None):
                count += 1
                echo_jsonl([hit]) if json else echo(shown(hit), painted=coloured())
    if not count:
        narrate("Nothing matches.")
        raise typer.Exit(1)
    if limit and count == limit:
        narrate(f"The first {limit}; --limit 0 prints all.")


def _episodes(hits: Iterator[Hit]) -> Iterator[str]:
    """Yields each episode once; an episode's hits are consecutive."""
    last = ""
    for hit in hits:
        if hit.episode_id != last:
            last = hit.episode_id
            yield last
