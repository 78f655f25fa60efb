"""`agentrl show`: one episode, one run, or the legend of the screens and the store, as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import JsonOption, console, echo, echo_json
from agentrl_cli.commands.options import RunStoreOptions, refuse_idle
from agentrl_cli.errors import NotFound

if TYPE_CHECKING:
    from agentrl_cli.store import RunRow, Store


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="An episode (id, unique prefix, last, best, worst), a run, or with --words a word. Default: last.",
            autocompletion=completion.episodes_and_runs,
        ),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", "-t", help="Every token with its numbers.")
    ] = False,
    turn: Annotated[int | None, typer.Option("--turn", help="Only this turn.")] = None,
    time: Annotated[
        bool, typer.Option("--time", help="Where the time goes, and a setting for it.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, max=2**62, help="With --time: a run's step.")
    ] = None,
    words: Annotated[
        bool,
        typer.Option(
            "--words", help="Explain a word, label, flag or rule; no NAME: all, rules by name."
        ),
    ] = False,
    json: JsonOption = False,
    *,
    where: RunStoreOptions,
) -> None:
    """Print an episode: turns, calls, results, rewards, flags with their evidence; with --tokens every token.

    --words explains the words of the screens, which the key W shows there, and the rules of `agentrl why`.

    --json prints {"id", "task_id", "reward_parts", "turns", …} as `agentrl export` does, tokens included with --tokens;
    with --time {"title", "seconds", "spans": [{"kind", "start", "seconds", "label", "branch"}], "totals", "advice",
    "command"}; with --words {section: {word: meaning}}.
    """
    if words:
        idle = {"--tokens": tokens, "--turn": turn is not None, "--time": time}
        refuse_idle("with --words", {**idle, "--step": step is not None})
        return _print_words(name or "", json)
    with where.open() as store:
        found = _find(store, "last" if name is None else name, where.run_id(store))
        if time or step is not None:
            refuse_idle("with --time", {"--tokens": tokens, "--turn": turn is not None})
            refuse_idle("for an episode", {"--step": isinstance(found, str) and step is not None})
            return _print_time(store, found, step, json)
        if not isinstance(found, str):
            refuse_idle("for a run", {"--tokens": tokens, "--turn": turn is not None})
            return _print_run(store, found, json)
        _print_episode(store, found, tokens, turn, json)


def _print_episode(store: Store, found: str, tokens: bool, turn: int | None, json: bool) -> None:
    from agentrl_cli.tui.common.episode_text import episode_lines

    turns = len(store.episodes.get(found).turns)
    if turn is not None and not 0 <= turn < turns:
        raise NotFound(
            f"Episode {found} has no turn {turn}.", hint=f"It has {turns}, counted from 0."
        )
    refuse_idle("with --json: it prints every turn", {"--turn": json and turn is not None})
    if json:
        return print_episode_json(store, found, tokens=tokens)
    return echo("\n".join(episode_lines(store, found, tokens=tokens, turn=turn)))


def _print_run(store: Store, run: RunRow, json: bool) -> None:
    from agentrl_cli.tui.common.episode_text import run_lines

    if not json:
        return echo("\n".join(run_lines(store, run)))
    steps, evals = store.runs.steps(run.id), store.runs.evals(run.id)
    state = {"state": run.state, "last_step": steps[-1] if steps else None}
    alerts = store.journal.folded_alerts(run.id)
    return echo_json({"run": run, **state, "evals": evals, "alerts": alerts})


def _print_words(word: str, json: bool) -> None:
    from agentrl_cli.reports.legend import find_words, legend_lines, rule_lines, rule_words

    found = find_words(word)
    if json:
        return echo_json(found if word else {**found, **rule_words()})
    width = min(console().width, 100)
    lines = [*legend_lines(found, width), *(() if word else rule_lines(width))]
    return echo("\n".join(lines))


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
