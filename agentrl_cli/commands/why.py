"""`agentrl why`: the diagnosis of a training, or the reasons why an episode failed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import JsonOption, echo, echo_json
from agentrl_cli.commands.options import StoreOptions
from agentrl_cli.commands.place import locate, place_in
from agentrl_cli.errors import NotFound, pluralise
from agentrl_cli.paths import find_project
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers

if TYPE_CHECKING:
    from agentrl_cli.reports.evidence import Evidence
    from agentrl_cli.store import RunRow, Store


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="run",
            help="A training (default: the newest), an episode, or a token of it.",
            autocompletion=completion.episodes_and_runs,
        ),
    ] = "last",
    json: JsonOption = False,
    *,
    where: StoreOptions,
) -> None:
    """Say why a training does not learn: a walk from the chat template to the evaluations, to the first fault.

    The fault comes with its number, an episode that proves it, and a command that changes it. An episode's reasons
    are its flags; docs/troubleshooting.md lists every rule. A token's (EPISODE@t2.31) are its probability at each
    checkpoint, and the groups that raised it most.

    JSON: {"run", "summary", "healed": [{"step", "rule", "key", "from", "to", "back"}], "finding": {"name", "stage",
    "level", "value", "threshold", "text", "advice", "command", "episode", "line"} or null, "next", "stages": [the same
    for each stage of the walk]}; of an episode {"episode", "outcome", "reasons": [{"name", "evidence", "turn"}]}; of a
    token {"episode", "turn", "token", "text", "probabilities", "start", "end", "groups": [{…}], "lost", "command"}
    """
    from agentrl_cli.reports.read_evidence import read_evidence

    with where.open() as store:
        if (place := place_in(name)) is not None:
            return _explain_token(store, store.episodes.resolve(name), place, json, where)
        try:
            run = store.runs.training(name)
        except NotFound as nothing:
            try:
                return _explain_episode(store, store.episodes.resolve(name), json)
            except NotFound:
                raise nothing from None
        evidence = read_evidence(store, run)
    _print_walk(run, evidence, json)


def _print_walk(run: RunRow, evidence: Evidence, json: bool) -> None:
    from agentrl_cli.reports import diagnosis

    found = diagnosis.diagnose(evidence)
    cause, summary = diagnosis.first_fault(found), diagnosis.summarise(evidence)
    following, lines = diagnosis.suggest(evidence), list(diagnosis.stages(found))
    if json:
        stages = [diagnosis.report(one) for one in lines]
        finding = diagnosis.report(cause) if cause else None
        healed, rest = evidence.changes, {"finding": finding, "next": following, "stages": stages}
        return echo_json({"run": run.name, "summary": summary, "healed": healed, **rest})
    summary = summary or f"{pluralise(len(evidence.steps), 'step')}."
    echo(f"{run.name}: {summary}")
    if cause is None and not evidence.steps:
        return echo("No step is done yet: there is nothing to judge.")
    for one in itertools.takewhile(lambda x: cause is None or x.stage != cause.stage, lines):
        echo(f"  {one.stage:<10}  {one.level}")
    if cause is not None:
        echo(f"  {cause.stage:<10}  {cause.level}\n{locate(cause.line)}")
    else:
        echo(f"No fault was found. {locate(following)}".rstrip())


def _explain_token(
    store: Store, id: str, place: tuple[int, int], json: bool, where: StoreOptions
) -> None:
    if "token" not in offers("explanations"):
        raise NotFound("No plugin explains tokens.", hint="The plugin taught, which ships, does.")
    base = find_project(override=where.project) or where.find().parent.parent
    lines, report = resolve("explanations", {}, "token")(store, id, place, base)
    return echo_json(report) if json else echo("\n".join(lines))


def _explain_episode(store: Store, id: str, json: bool) -> None:
    from agentrl_cli.rollout.flags import find_flags
    from agentrl_cli.store.rows import episode_state

    episode, row = store.episodes.get(id), store.episodes.row(id)
    state = episode_state(row, store.runs.get(row.run_id) if row.run_id else None)
    flags = find_flags(episode)
    if json:
        reasons = [{"name": f.name, "evidence": f.evidence, "turn": f.turn} for f in flags]
        return echo_json({"episode": episode.id, "outcome": episode.outcome, "reasons": reasons})
    echo(f"{episode.id}: {state}{f', {episode.error}' if episode.error else ''}")
    for flag in flags:
        turn = f", turn {flag.turn}" if flag.turn is not None else ""
        echo(f"  {flag.evidence} ({flag.name}{turn})")
    parts = [
        f"{p.name} {p.value:g}{f' ({p.detail})' if p.detail else ''}" for p in episode.reward_parts
    ]
    echo(f"  reward: {', '.join(parts) or 'not graded'}")
