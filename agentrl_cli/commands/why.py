"""`agentrl why`: the diagnosis of a training, or the reasons why an episode failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import JsonOption, echo, echo_json
from agentrl_cli.commands.options import StoreOptions
from agentrl_cli.errors import NotFound

if TYPE_CHECKING:
    from agentrl_cli.store import RunRow, Store


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="run",
            help="A training (default: the newest one), or an episode (id, best, worst).",
            autocompletion=completion.episodes_and_runs,
        ),
    ] = "last",
    json: JsonOption = False,
    *,
    where: StoreOptions,
) -> None:
    """Say why a training does not learn: a walk from the chat template to the evaluations, to the first fault.

    The fault comes with its number, an episode that proves it, and a command that changes it. An episode's reasons
    are its flags with their evidence. docs/troubleshooting.md lists every rule.

    JSON: {"run", "summary", "finding": {"name", "stage", "level", "value", "threshold", "text", "advice", "command",
    "episode", "line"} or null, "next", "stages": [the same for each stage of the walk]}; of an episode {"episode",
    "outcome", "reasons": [{"name", "evidence", "turn"}]}
    """
    from agentrl_cli.reports.diagnosis import diagnose, first_fault, report, suggest, summarise
    from agentrl_cli.reports.diagnosis import stages as walk
    from agentrl_cli.reports.read_evidence import read_evidence

    with where.open() as store:
        run = _training(store, name)
        if run is None:
            return _explain_episode(store, name, json)
        evidence = read_evidence(store, run)
    found = diagnose(evidence)
    cause, summary, following = first_fault(found), summarise(evidence), suggest(evidence)
    lines = list(walk(found))
    if json:
        finding, stages = report(cause) if cause else None, [report(one) for one in lines]
        rest = {"finding": finding, "next": following, "stages": stages}
        return echo_json({"run": run.name, "summary": summary, **rest})
    echo(f"{run.name}: {summary or f'{len(evidence.steps)} steps.'}")
    for one in lines[
        : len(lines) if cause is None else [x.stage for x in lines].index(cause.stage)
    ]:
        echo(f"  {one.stage:<10}  ok")
    if cause is not None:
        echo(f"  {cause.stage:<10}  {cause.level}\n{cause.line}")
    else:
        echo(f"No fault was found. {following}".rstrip())


def _training(store: Store, name: str) -> RunRow | None:
    """Return a training by its name; None if the name is an episode's. Raises NotFound if it is neither."""
    try:
        return store.runs.training(name)
    except NotFound as nothing:
        try:
            store.episodes.resolve(name)
        except NotFound:
            raise nothing from None
        return None


def _explain_episode(store: Store, name: str, json: bool) -> None:
    from agentrl_cli.rollout.flags import find_flags

    episode = store.episodes.get(store.episodes.resolve(name))
    flags = find_flags(episode)
    if json:
        reasons = [{"name": f.name, "evidence": f.evidence, "turn": f.turn} for f in flags]
        return echo_json({"episode": episode.id, "outcome": episode.outcome, "reasons": reasons})
    echo(f"{episode.id}: {episode.outcome}{f', {episode.error}' if episode.error else ''}")
    for flag in flags:
        echo(
            f"  {flag.evidence} ({flag.name}{f', turn {flag.turn}' if flag.turn is not None else ''})"
        )
    parts = [
        f"{p.name} {p.value:g}{f' ({p.detail})' if p.detail else ''}" for p in episode.reward_parts
    ]
    echo(f"  reward: {', '.join(parts) or 'not graded'}")
