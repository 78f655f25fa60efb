"""`agentrl failures`: the modes of failure of a run, and scanners over its episodes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import JsonOption, echo, echo_json, narrate, warn
from agentrl_cli.commands.options import StoreOptions, refuse_idle
from agentrl_cli.commands.place import locate
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import UsageError, pluralise

if TYPE_CHECKING:
    from agentrl_cli.plugins.failures.modes import Mode
    from agentrl_cli.store import RunRow, Store

FOREIGN = ("import", "serve")
"""Kinds of runs whose episodes have no pack that could sample them again."""


def command(
    run: Annotated[
        str,
        typer.Argument(help="A run (default: the newest).", autocompletion=completion.runs),
    ] = "last",
    kind: Annotated[
        str, typer.Option(help="Its episodes of this kind: train, eval, rollout …")
    ] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Modes shown; default: 12.")
    ] = None,
    scanner: Annotated[
        str,
        typer.Option(
            "--scan",
            metavar="FILE.py:FUNCTION",
            help="Tag the episodes that a function flags, or a judge (a YAML file with question, url and model).",
        ),
    ] = "",
    label: Annotated[
        str,
        typer.Option(
            help="With --scan: compare with people's tags LABEL and not:LABEL (Cohen's kappa)."
        ),
    ] = "",
    json: JsonOption = False,
    *,
    where: StoreOptions,
) -> None:
    """Group the failed episodes of a run by actions that the solved ones did not take.

    Each mode has its count, how it changed from the first to the last third of the steps, two examples, and how many
    siblings with the same acts before the fork solved the task: what sampling again from there would recover.

    JSON: {"run", "kind", "attempts", "failed", "modes": [{"mode", "count", "share", "first_third", "last_third",
    "siblings", "recovered", "examples": [{"episode", "turn"}]}]}, the thirds null for fewer than three steps; with
    --scan {"scanner", "scanned", "flagged": [id], "failed": [[id, error]], "agreement": {"kappa", "low", "high",
    "labelled"} or null}
    """
    if label and not scanner:
        raise UsageError("--label compares people's tags with a scanner: name one with --scan.")
    refuse_idle("with --scan", {"--limit": scanner and limit})
    refuse_idle("with --json: it prints every mode", {"--limit": json and limit})
    with where.open(readonly=not scanner) as store:
        row = store.runs.get(run)
        narrate(f"Reading the episodes of {row.name} …")
        if scanner:
            _scan(store, row.id, kind or row.kind, scanner, label, json)
        else:
            _list(store, row, kind or row.kind, limit or 12, json)


def _list(store: Store, row: RunRow, kind: str, limit: int, json: bool) -> None:
    from agentrl_cli.plugins.failures.modes import find_modes, read_attempts

    with Progress("failures"):
        attempts = read_attempts(store, row.id, kind)
        modes = find_modes(attempts)
    failed = sum(len(mode.failures) for mode in modes)
    if json:
        counts = {"attempts": len(attempts), "failed": failed}
        shown = [mode.as_json() for mode in modes]
        return echo_json({"run": row.name, "kind": kind, **counts, "modes": shown})
    if not attempts:
        raise UsageError(f"{row.name} has no graded episodes of the kind {kind}.")
    echo(f"{row.name}: {failed} of {pluralise(len(attempts), 'attempt')} ({kind}) failed.")
    for mode in modes[:limit]:
        _show(mode, again=row.kind not in FOREIGN)
    if len(modes) > limit:
        rest = sum(len(mode.failures) for mode in modes[limit:])
        narrate(f"{rest} more in {len(modes) - limit} rarer modes: --limit {len(modes)}")


def _show(mode: Mode, *, again: bool) -> None:
    solved, siblings = mode.recovery
    echo(f"{len(mode.failures):>6}  {mode.share:>4.0%}  {mode.text}")
    if mode.course is not None:
        early, late = mode.course
        change = (
            f"{early:.0%} of the attempts in the first third of the steps, {late:.0%} in the last"
        )
        echo(f"              {change}")
    if siblings:
        share = f"{solved / siblings:.0%} of {pluralise(siblings, 'sibling')}"
        echo(f"              sampled again from the fork: {share} with the same acts solved it")
    for one in mode.examples:
        place = f' --whatif "turn={one.turn} n=4"' if again and one.turn else f"@t{one.turn}"
        echo(locate(f"              agentrl replay {one.attempt.id}{place}"))


def _scan(store: Store, run: str, kind: str, target: str, label: str, json: bool) -> None:
    from pathlib import Path

    from agentrl_cli.plugins.failures.scan import agree, load_scanner, scan

    name, scanner = load_scanner(target, Path.cwd())
    rows = store.episodes.used(f"kind:{kind} -outcome:none", "time", run)
    with Progress(name, bar=False):  # the scanner may draw one
        flagged, failed = asyncio.run(scan(store, rows, name, scanner))
    lost = dict(failed)
    seen = [row for row in rows if row.id not in lost]
    agreement = agree(seen, flagged, label) if label else None
    if json:
        scores = agreement and asdict(agreement)
        counts = {"scanner": name, "scanned": len(rows), "flagged": flagged, "failed": failed}
        return echo_json({**counts, "agreement": scores})
    term = f"tag:scan:{name}" if name.isidentifier() else f'tag:"scan:{name}"'
    count = f"{name} flags {len(flagged)} of {pluralise(len(rows), 'episode')}"
    echo(f"{count}: agentrl ls -f {quote(term)}")
    if failed:
        warn(f"It failed on {len(failed)}; the first, {failed[0][0]}: {failed[0][1]}")
    if agreement is not None:
        echo(
            f"Agreement with people's {agreement.labelled} labels: kappa {agreement.kappa:.2f}"
            f" [{agreement.low:.2f}, {agreement.high:.2f}]"
        )
    elif label:
        warn(
            f"Fewer than two scanned episodes have the tag {label} or not:{label}: nothing to compare."
        )
