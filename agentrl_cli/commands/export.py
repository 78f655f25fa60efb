"""`agentrl export`: episodes as JSON Lines, sequences or one HTML page; a run as a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import JsonOption, echo, echo_json, narrate
from agentrl_cli.commands.options import (
    FilterOption,
    ForceOption,
    MaskOption,
    RunStoreOptions,
    refuse_idle,
)
from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.registry import names as known_names
from agentrl_cli.registry import resolve

if TYPE_CHECKING:
    from agentrl_cli.store import Store


FORMATS = ("jsonl", "html", "sequences", "md")
"""The formats that need no plugin."""


NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[EPISODES]",
        help="Episodes (id, last, best, worst); none: by filter. With --report: a run.",
        autocompletion=completion.episodes_and_runs,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The file (default: stdout); of a report also a folder."),
]
GroupOption = Annotated[bool, typer.Option("--group", help="Include each episode's whole group.")]
TokensOption = Annotated[
    bool, typer.Option("--tokens/--no-tokens", help="Ids and numbers of every token.")
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="jsonl; html: one page, the default for --out X.html; sequences: rows for trainers;"
        f" {', '.join(known_names('exports', {}))}. With --report: html or md.",
    ),
]
ReportOption = Annotated[
    bool, typer.Option("--report", help="What a run learned; default: the newest training.")
]


def command(
    names: NamesArgument = None,
    filter: FilterOption = "",
    out: OutOption = None,
    force: ForceOption = False,
    group: GroupOption = False,
    tokens: TokensOption = True,
    mask: MaskOption = True,
    format: FormatOption = "",
    report: ReportOption = False,
    json: JsonOption = False,
    *,
    where: RunStoreOptions,
) -> None:
    """Write episodes as JSONL or HTML, oldest first, with everything stored; what looks like a secret is masked.

    If a secret was masked, the token ids, which spell it, are left out. With --out, --json prints {"path", "episodes"}.

    --format sequences writes a row per token sequence, {"episode", "branch", "reward", "input_ids", "loss_mask",
    "old_log_probs", "advantages", …}: an episode, or each of its branches, in which the tokens of
    earlier ones are context.

    --report writes report-RUN.html, one file without scripts that loads nothing: curves, evaluations with intervals,
    flipped tasks, the best, worst and oddest episode, settings and machine. With --format md it is Markdown, with its
    pictures in a folder beside it. JSON: {"path", "pictures", "episodes", "flipped"}.
    """
    format = _check_options(format, filter, out, force, bool(names), report)
    if report:
        idle = {"--group": group, "--no-tokens": not tokens, "--run": names and where.run}
        refuse_idle("with --report", idle)
        if len(names or []) > 1 or format not in ("", "html", "md"):
            raise UsageError("A report is of one run, as --format html or md.")
        run = (names or [where.run or ""])[0]
        return _write_report(where, run, out, format == "md", (mask, force, json))
    if format == "md":
        raise UsageError("--format md is for a report.", hint="agentrl export --report --format md")
    if format == "html" and out is None:
        raise UsageError("An HTML page needs a file.", hint="Name it with --out episodes.html.")
    if format not in ("", "jsonl"):
        refuse_idle(f"with --format {format}", {"--no-tokens": not tokens})
    with where.open() as store:
        ids = _choose(store, names or [], filter, where.run_id(store), group)
        count = _write_episodes(store, ids, out, format or "jsonl", (tokens, mask))
    if count is None:
        return
    what = "sequence" if format == "sequences" else "episode"
    if json:
        echo_json({"path": out, f"{what}s": count})
    else:
        narrate(f"{count:,} {what}{'' if count == 1 else 's'} written to {out}.")


def _check_options(
    format: str, filter: str, out: Path | None, force: bool, named: bool, report: bool
) -> str:
    """Return the format: html if --out ends with .html. Raises UsageError for what excludes each other or exists."""
    known = known_names("exports", dict.fromkeys(FORMATS, ""))
    if format and format not in known:
        raise NotFound.of("format", format, known)
    if filter in known:
        raise UsageError(
            f"-f is --filter, and {filter} is a format.",
            hint=f"Write --format {filter}, or --filter text:{filter} to search for that word.",
        )
    if filter and (named or report):
        raise UsageError(
            "--filter cannot be combined with names of episodes or --report: leave one out."
        )
    if out is not None and out.is_dir() and not report:
        raise UsageError(f"{out} is a folder.", hint="Name a file in it.")
    if out is not None and out.is_file() and not force:
        raise UsageError(f"{out} exists already.", hint="--force overwrites it.")
    refuse_idle("without --out", {"--force": force and out is None and not report})
    page = not format and not report and out is not None and out.suffix.lower() in (".html", ".htm")
    return "html" if page else format


def _write_episodes(
    store: Store, ids: list[str], out: Path | None, kind: str, shown: tuple[bool, bool]
) -> int | None:
    """Write episodes to a file and return their number, or print them; `shown`: whether with tokens, whether masked."""
    from agentrl_cli.reports.export import export_lines, sequence_rows, write_lines
    from agentrl_cli.reports.html import export_html
    from agentrl_cli.tui.common.reader import token_texts

    tokens, masked = shown
    if kind == "html" and out is not None:
        title = f"agentrl {ids[0] if len(ids) == 1 else out.stem}"
        return export_html(store, ids, out, token_texts, title=title, masked=masked)
    if kind == "jsonl":
        lines = export_lines(store, ids, tokens=tokens, masked=masked)
    elif kind == "sequences":
        lines = sequence_rows(store, ids, masked=masked, narrate=narrate)
    else:
        lines = resolve("exports", {}, kind)(store, ids, masked)
    if out is not None:
        return write_lines(lines, out)
    for line in lines:
        echo(line)
    return None


def _choose(store: Store, names: list[str], filter: str, run: str | None, group: bool) -> list[str]:
    """Return the ids of the episodes that are named, else of those that match the filter."""
    ids = [store.episodes.resolve(name, run) for name in names]
    if not names:
        rowids = store.episodes.ids(f"{filter} -outcome:none", "time", run)
        ids = [row.id for row in store.episodes.rows(rowids)]
    if group:
        ids = [row.id for episode in ids for row in store.episodes.siblings(episode)]
    return list(dict.fromkeys(ids))


def _write_report(
    where: RunStoreOptions, run: str, out: Path | None, markdown: bool, how: tuple[bool, bool, bool]
) -> None:
    """Write the report of a run; `how`: whether to mask secrets, to overwrite, to print JSON."""
    from agentrl_cli.reports.report import make_report
    from agentrl_cli.reports.report_pages import write_report
    from agentrl_cli.tui.common.reader import token_texts

    mask, force, json = how
    with where.open() as store:
        trained = (row.id for row in store.runs.all() if row.kind == "train")
        found = make_report(store, run or next(trained, "last"), token_texts, masked=mask)
    path = out or Path()
    if path.is_dir():
        name = found.run.name.replace("/", "-")
        path /= f"report-{name}.{'md' if markdown else 'html'}"
    if path.exists() and not force:
        raise UsageError(f"{path} exists already.", hint="--force overwrites it.")
    write_report(found, path, markdown=markdown)
    if json:
        pictures = [name for name, _ in found.pictures]
        episodes = {sample.why: sample.row.id for sample in found.samples}
        flipped = len(found.flipped)
        echo_json({"path": path, "pictures": pictures, "episodes": episodes, "flipped": flipped})
    else:
        narrate(found.verdict)
        narrate(f"The report of {found.run.name} is in {path}.")
