"""`agentrl compare`: two runs beside each other, task by task; or a training beside itself under other rewards."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    JsonOption,
    SetOption,
    data_stdout,
    echo,
    echo_json,
    narrate,
    warn_unsafe,
)
from agentrl_cli.commands.options import FilterOption, StoreOptions
from agentrl_cli.commands.tables import print_rows
from agentrl_cli.errors import UsageError
from agentrl_cli.tui.common.plain_text import cell

if TYPE_CHECKING:
    from agentrl_cli.reports.compare import RunComparison
    from agentrl_cli.reports.rescore import Change
    from agentrl_cli.store import EvalRow

MOST = 22
"""Characters of a setting's value on a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions:
    """How a training is scored again."""

    rewards: Annotated[
        bool,
        typer.Option("--rewards", help="Compare one training with itself, scored again."),
    ] = False
    sets: SetOption = None
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="FN",
            help="module:object or file.py:fn; NAME=FN replaces a part; repeatable.",
        ),
    ] = None
    advantage: Annotated[
        list[str] | None,
        typer.Option(
            "--advantage",
            help="Another estimator: rloo, gigpo …; repeat to put several side by side.",
        ),
    ] = None
    filter: FilterOption = ""
    name: Annotated[str, typer.Option("--name", help="The name of the score set.")] = ""
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Store the result as a score set.")
    ] = True

    def __bool__(self) -> bool:
        given = self.sets or self.reward or self.advantage or self.filter or self.name
        return self.rewards or bool(given) or not self.keep


def command(
    before: Annotated[
        str | None,
        typer.Argument(help="A run: name, id or unique prefix.", autocompletion=completion.runs),
    ] = None,
    after: Annotated[
        str | None,
        typer.Argument(help="The run to compare it with; `last`.", autocompletion=completion.runs),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Lines; flipped, most changed first.")
    ] = 30,
    json: JsonOption = False,
    *,
    scoring: RewardOptions,
    where: StoreOptions,
) -> None:
    """Compare two runs: metrics of the last ten steps, settings that differ, evaluations, tasks gained and lost.

    Without the second run the newest one is taken. The tables call the first run A and the second B.
    Tasks are taken from the newest evaluation of each run if both have one, else from all their attempts. A task
    counts as solved if more than half of its attempts are.

    --rewards, or any option of it, scores one training's episodes again: with new weights (--set rewards.x=2), a new
    function or another estimator. Nothing is generated, and the original scores are kept. The result is a score set of
    the run: `show` and replay print it, and filters find it (`agentrl ls -f "delta:<0"`, `rescored:>0.5`). Several
    estimators make one set each, and one table: `--advantage rloo --advantage opo`.

    JSON: {"before", "after", "metrics": {name: {"before", "after"}}, "settings", "evals", "difference", "p_value",
    "gained", "lost", "tasks": [{"task_id", "flip", "before": [solved, attempts], …}]}

    JSON of --rewards: {"run", "set", "summary", "episodes": [{"episode", "reward_before", "reward", "delta",
    "advantage_before", "advantage", "turns", "fact_before", "fact", "parts"}]}; for several estimators a list of these.
    """
    from agentrl_cli.reports.compare import compare_runs

    if scoring:
        if after is not None:
            raise UsageError("--rewards scores one training again.", hint="Name one run.")
        return _score_again(before or "last", scoring, where, limit, json)
    if before is None:
        raise UsageError("Name a run to compare.", hint="`agentrl ls runs` lists them.")
    with where.open() as store:
        found = compare_runs(store, before, after or "last")
    if found.before.id == found.after.id:
        raise UsageError(
            f"{found.before.name} would be compared with itself.",
            hint="One name is compared with the newest run: name two (`agentrl ls runs`), or use --rewards.",
        )
    echo_json(found.report()) if json else _print_runs(found, limit)


def _print_runs(found: RunComparison, limit: int) -> None:
    echo(f"A  {found.before.name}\nB  {found.after.name}\n")
    settings = [
        [name, _short(a), _short(b)]
        for name, a, b in found.settings
        if not isinstance(a, dict) and not isinstance(b, dict)
    ]
    evals = [[name, _interval(a), _interval(b)] for name, a, b in found.evals]
    for head, rows in (
        ("setting", settings),
        ("mean of the last 10 steps", found.metrics),
        ("evaluation", evals),
    ):
        if rows:
            print_rows([head, "A", "B"], rows)
            echo()
    if not found.tasks:
        narrate(f"No task was attempted by both ({found.source}).")
        return
    one = found.difference
    echo(
        f"{one.n} tasks attempted by both ({found.source}): difference in the share solved"
        f" {one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]; {found.gained} gained, {found.lost} lost,"
        f" McNemar's exact test p = {found.p_value:.3g}\n"
    )
    heads = ["flip", "task", "A", "B", "reward A", "reward B", "replay A", "replay B"]
    shown = [
        [line.flip, line.task_id, "/".join(map(str, line.before)), "/".join(map(str, line.after)),
         line.reward_before, line.reward_after, line.episode_before, line.episode_after]
        for line in found.tasks[:limit]
    ]  # fmt: skip
    print_rows(heads, shown, least=("reward A", "reward B", "replay A"))
    echo()
    if len(shown) < len(found.tasks):
        narrate(f"{len(shown)} of {len(found.tasks)} tasks; --limit prints more, --json all.")


def _short(value: object) -> str:
    """Return a setting's value, cut where a person reads it."""
    text = cell(value)
    return f"{text[:MOST]}…" if len(text) > MOST and sys.stdout.isatty() else text


def _interval(row: EvalRow | None) -> str:
    if row is None or row.pass_rate is None:
        return "-"
    known = row.low is not None and row.high is not None
    between = f" [{row.low:.3f}, {row.high:.3f}]" if known else ""
    return f"{row.pass_rate:.3f}{between} @{row.name.rpartition('@')[2]}"


def _score_again(
    run: str, given: RewardOptions, where: StoreOptions, limit: int, json: bool
) -> None:
    """Score a training again, once for each estimator, and print what changed."""
    from agentrl_cli.reports.rescore import summary
    from agentrl_cli.reports.score_sets import ScoreSet, score_again

    estimators = given.advantage or [None]  # type: ignore[list-item]  # None: the run's own
    results = []
    with data_stdout(), where.open(readonly=False) as store:
        row = store.runs.training(run)
        for one in estimators:
            wanted = ScoreSet(given.sets or (), given.reward or (), given.filter, one)
            name = f"{given.name} {one}" if given.name and len(estimators) > 1 else given.name
            results.append(
                score_again(
                    store,
                    row,
                    wanted,
                    project=where.project,
                    store_as=name if given.keep else None,
                    on_sandbox=warn_unsafe,
                )
            )
    if json:
        reports = [
            {"run": row.name, "set": stored, "summary": summary(found),
             "episodes": [c.report() for c in found]}
            for stored, found in results
        ]  # fmt: skip
        return echo_json(reports[0] if len(reports) == 1 else reports)
    if len(results) == 1:
        _print_changes(results[0][1], summary(results[0][1]), limit)
    else:
        _print_estimators(given.advantage or [], [found for _, found in results], limit)
    names = " ".join(f'"{stored}"' for stored, _ in results if stored)
    narrate(f'Kept as {names}: agentrl ls -f "delta:<0"' if names else "Nothing was stored.")


def _print_changes(found: Sequence[Change], total: dict[str, Any], limit: int) -> None:
    found = sorted(
        found,
        key=lambda c: (
            abs(c.delta or 0.0),
            abs((c.advantage or 0.0) - (c.episode.advantage or 0.0)),
        ),
        reverse=True,
    )
    names = ["episode", "task", "step", "reward", "now", "delta", "adv", "now", "fact now"]
    rows = [
        [c.episode.id, c.episode.task_id, c.episode.step, c.episode.reward, c.reward, c.delta, c.episode.advantage,
         c.advantage, c.fact]
        for c in found[:limit]
    ]  # fmt: skip
    print_rows(names, rows)
    before, after = total["reward_before"], total["reward"]
    narrate(
        f"{total['changed']} of {total['episodes']} rewards changed; mean {before:.3f} → {after:.3f}; trained"
        f" {total['trained_before']} → {total['trained']}; {total['sign_flips']} advantages changed their sign"
        if before is not None
        else f"None of {total['episodes']} episodes was graded."
    )


def _print_estimators(
    names: Sequence[str], results: Sequence[Sequence[Change]], limit: int
) -> None:
    """Print a line per episode with a column per estimator, the largest disagreement first."""

    def spread(row: Sequence[Change]) -> float:
        values = [c.advantage or 0.0 for c in row]
        return max(values) - min(values)

    rows = sorted(zip(*results, strict=True), key=spread, reverse=True)
    episodes = [(row[0].episode, row) for row in rows[:limit]]
    lines = [
        [e.id, e.task_id, e.step, row[0].reward, e.advantage, *(c.advantage for c in row)]
        for e, row in episodes
    ]
    print_rows(["episode", "task", "step", "reward", "trained with", *names], lines)
    narrate(
        f"Mean advantage of {len(rows)} episodes under each estimator; - if it would not train."
    )
