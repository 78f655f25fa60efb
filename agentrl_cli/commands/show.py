"""`agentrl show`: one episode, or one run, as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import JsonOption, console, echo, echo_json
from agentrl_cli.commands.options import RunStoreOptions
from agentrl_cli.errors import NotFound

if TYPE_CHECKING:
    from agentrl_cli.store import RunRow, Store


def command(
    name: Annotated[
        str,
        typer.Argument(
            help="An episode (id, unique prefix, last, best, worst), or a run.",
            autocompletion=completion.episodes_and_runs,
        ),
    ] = "last",
    tokens: Annotated[
        bool, typer.Option("--tokens", "-t", help="Every token with its numbers.")
    ] = False,
    turn: Annotated[int | None, typer.Option("--turn", help="Only this turn.")] = None,
    time: Annotated[
        bool, typer.Option("--time", help="Where the time goes, and a setting for it.")
    ] = False,
    step: Annotated[int | None, typer.Option("--step", help="With --time: a run's step.")] = None,
    json: JsonOption = False,
    *,
    where: RunStoreOptions,
) -> None:
    """Print an episode: turns, calls, results, rewards, flags with their evidence; with --tokens every token.

    --json prints {"id", "task_id", "reward_parts", "turns", …} as `agentrl export` does, tokens included with --tokens;
    with --time {"title", "seconds", "spans": [{"kind", "start", "seconds", "label", "branch"}], "totals", "advice",
    "command"}.
    """
    from agentrl_cli.tui.common.episode_text import episode_lines, run_lines

    with where.open() as store:
        found = _find(store, name, where.run_id(store))
        if time or step is not None:
            return _print_time(store, found, step, json)
        if isinstance(found, str):
            turns = len(store.episodes.get(found).turns)
            if turn is not None and not 0 <= turn < turns:
                raise NotFound(
                    f"Episode {found} has no turn {turn}.", hint=f"It has {turns}, counted from 0."
                )
            if json:
                return print_episode_json(store, found, tokens=tokens)
            lines = episode_lines(store, found, tokens=tokens, turn=turn)
        elif json:
            steps, evals = store.runs.steps(found.id), store.runs.evals(found.id)
            state = {"state": found.state, "last_step": steps[-1] if steps else None}
            alerts = store.journal.folded_alerts(found.id)
            return echo_json({"run": found, **state, "evals": evals, "alerts": alerts})
        else:
            lines = run_lines(store, found)
        for line in lines:
            echo(line)


def _print_time(store: Store, found: str | RunRow, step: int | None, json: bool) -> None:
    from agentrl_cli.reports.spans import of_episode, of_step, waterfall_lines
    from agentrl_cli.store import RunRow

    shown = (
        of_step(store, found, step)
        if isinstance(found, RunRow)
        else of_episode(store, store.episodes.get(found))
    )
    lines = waterfall_lines(shown, min(console().width, 120))
    return echo_json(shown.report()) if json else echo("\n".join(lines))


def print_episode_json(store: Store, episode_id: str, *, tokens: bool = False) -> None:
    """Print an episode as `agentrl export` writes it."""
    from agentrl_cli.reports.export import episode_object

    episode, signals = store.episodes.get(episode_id), store.signals.get(episode_id)
    echo_json(episode_object(episode, signals, tokens=tokens))


def _find(store: Store, name: str, run_id: str | None) -> str | RunRow:
    """Return an episode's id, or a run if the name matches no episode."""
    try:
        return store.episodes.resolve(name, run_id)
    except NotFound as nothing:
        try:
            return store.runs.get(name)
        except NotFound:
            raise nothing from None
