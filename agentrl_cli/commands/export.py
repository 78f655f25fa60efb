"""`agentrl export`: episodes as JSON Lines, or as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    RunOption,
    echo,
    echo_json,
    narrate,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import UsageError

if TYPE_CHECKING:
    from agentrl_cli.store import Store


class Kind(StrEnum):
    """The output format."""

    jsonl = "jsonl"
    html = "html"
    sequences = "sequences"


EpisodesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Episodes (id, last, best, worst); none: by filter.",
        autocompletion=completion.episodes,
    ),
]


def command(
    episodes: EpisodesArgument = None,
    filter: Annotated[str, typer.Option("--filter", "-f", help="As in `agentrl ls`.")] = "",
    run: RunOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; default: stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    group: Annotated[
        bool, typer.Option("--group", help="Include each episode's whole group.")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens/--no-tokens", help="Ids and numbers of every token.")
    ] = True,
    mask: Annotated[
        bool, typer.Option("--mask/--no-mask", help="Mask what looks like a secret.")
    ] = True,
    format: Annotated[
        Kind,
        typer.Option(
            "--format",
            help="jsonl; html: one page that needs nothing else; sequences: rows for trainers.",
        ),
    ] = Kind.jsonl,
    html: Annotated[bool, typer.Option("--html", help="The same as --format html.")] = False,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Write episodes as JSONL or HTML, oldest first, with everything stored; what looks like a secret is masked.

    If a secret was masked, the token ids, which spell it, are left out. With --out, --json prints
    {"path", "episodes"}.

    --format sequences writes a row per token sequence, {"episode", "branch", "reward", "input_ids", "loss_mask",
    "old_log_probs", "advantages", …}: an episode, or each of its branches, where what an earlier one trains is context.
    """
    from agentrl_cli.reports.export import export_lines, sequence_rows, write_lines
    from agentrl_cli.store import Store

    format = Kind.html if html else format
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists already.", hint="--force overwrites it.")
    with Store.open(find_db(project, db), readonly=True) as store:
        ids = _choose(store, episodes or [], filter, run, group)
        if format is Kind.html:
            count = _html(store, ids, out, mask)
        else:
            rows = sequence_rows(store, ids, masked=mask) if format is Kind.sequences else None
            lines = rows or export_lines(store, ids, tokens=tokens, masked=mask)
            if out is None:
                echo_lines(lines)
                return
            count = write_lines(lines, out)
    what = "sequence" if format is Kind.sequences else "episode"
    if json:
        echo_json({"path": out, f"{what}s": count})
    else:
        narrate(f"{count:,} {what}{'' if count == 1 else 's'} written to {out}.")


def echo_lines(lines: Iterable[str]) -> None:
    """Prints each line to stdout."""
    for line in lines:
        echo(line)


def _html(store: Store, ids: list[str], out: Path | None, mask: bool) -> int:
    from agentrl_cli.reports.html import export_html
    from agentrl_cli.tui.common.load_episode import token_texts

    if out is None:
        raise UsageError("An HTML page needs a file.", hint="Name it with --out episodes.html.")
    return export_html(
        store,
        ids,
        out,
        token_texts,
        title=f"agentrl {ids[0] if len(ids) == 1 else out.stem}",
        masked=mask,
    )


def _choose(store: Store, names: list[str], filter: str, run: str | None, group: bool) -> list[str]:
    run_id = store.runs.get(run).id if run else None
    ids = [store.episodes.resolve(name, run_id) for name in names]
    if not names:
        rowids = store.episodes.ids(f"{filter} -outcome:none", "time", run_id)
        ids = [row.id for row in store.episodes.rows(rowids)]
    if group:
        ids = [row.id for episode in ids for row in store.episodes.siblings(episode)]
    return list(dict.fromkeys(ids))
