"""`agentrl replay`: step through an episode, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands.common import (
    DbOption,
    ProjectOption,
    RunOption,
    echo,
    echo_jsonl,
    find_db,
    is_terminal,
    narrate,
)
from agentrl_cli.errors import UsageError


def command(
    episode: Annotated[
        str | None,
        typer.Argument(help="An episode: id, unique beginning, link, or last, best, worst. None: the list."),
    ] = None,
    run: RunOption = None,
    filter_: Annotated[str, typer.Option("--filter", "-f", help="Episodes for n/N and the list: reward:<0.5 …")] = "",
    sort: Annotated[str, typer.Option(help="Order of the list: -time, reward, -tokens …")] = "-time",
    layer: Annotated[str, typer.Option(help="What to colour tokens by, with --plain.")] = "",
    plain: Annotated[bool, typer.Option("--plain", help="Print it; no screen.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print every token as a JSON line, with all numbers.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the screen as an SVG file and leave.")] = None,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Step through an episode: turns, tool calls, every token with what training made of it, reward, siblings."""
    path = find_db(project, db)
    if tokens or (svg is None and (plain or not is_terminal())):
        _print(path, episode or "last", run, layer, tokens)
        return
    from agentrl_cli.store import Store

    with Store.open(path, readonly=True) as store:
        run_id = store.run(run).id if run else None
        if filter_:
            store.episode_ids(filter_, sort, run=run_id)  # a typo is told before the screen opens
        if episode is None and svg is not None:
            episode = "last"
        found = store.resolve_episode(episode, run_id) if episode else None
    place = _place(episode or "")
    from agentrl_cli.tui.app import AgentApp, save_svg
    from agentrl_cli.tui.episodes import Browse, EpisodesScreen
    from agentrl_cli.tui.replay import ReplayScreen

    browse = Browse(filter_, sort, run_id)
    if found is None:
        AgentApp(path, lambda reader: EpisodesScreen(reader, browse)).run()
        return
    app = AgentApp(path, lambda reader: ReplayScreen(reader, found, browse, place))
    if svg is None:
        app.run()
        return
    save_svg(app, svg, f"agentrl replay {found}")
    narrate(f"wrote {svg}")


def _print(path: Path, episode: str, run: str | None, layer: str, tokens: bool) -> None:
    """The same as text; lines are as wide as the terminal, 100 in a pipe."""
    from agentrl_cli.commands.common import console
    from agentrl_cli.store import Store
    from agentrl_cli.tui.layers import LAYERS
    from agentrl_cli.tui.plain import replay_lines, token_rows

    if layer and layer not in LAYERS:
        raise UsageError(f"There is no layer {layer!r}.", hint=f"Layers: {', '.join(LAYERS)}.")
    with Store.open(path, readonly=True) as store:
        found = store.resolve_episode(episode, store.run(run).id if run else None)
        if tokens:
            echo_jsonl(token_rows(store, found))
            return
        out = console()
        width = out.width if out.is_terminal else 100
        for text in replay_lines(store, found, layer=layer, width=width):
            if out.is_terminal:
                out.print(text, soft_wrap=True)
            else:
                echo(text.plain)


def _place(name: str) -> tuple[int, int] | None:
    """(turn, token) of a link `agentrl:EPISODE@t2.31`."""
    _, _, spot = name.partition("@t")
    turn, _, token = spot.partition(".")
    if not turn.isdigit():
        return None
    return int(turn), int(token) if token.isdigit() else 0
