"""`agentrl replay`: step through an episode, token by token."""

from __future__ import annotations

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
    echo_jsonl,
    is_terminal,
    narrate,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import AgentRLError, NotFound, UsageError

if TYPE_CHECKING:
    from agentrl_cli.store import Store

EpisodeArgument = Annotated[
    str | None,
    typer.Argument(
        help="An episode: id, unique prefix, link, or last, best, worst. None: the list.",
        autocompletion=completion.episodes,
    ),
]
FilterOption = Annotated[
    str, typer.Option("--filter", "-f", help="Episodes for n/N and the list: reward:<0.5 …")
]
SortOption = Annotated[str, typer.Option(help="Order of the list: -time, reward, -tokens …")]
LayerOption = Annotated[str, typer.Option(help="What to colour tokens by, with --plain.")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Print it; no screen.")]
TokensOption = Annotated[
    bool, typer.Option("--tokens", help="Print every token as a JSON line, with all numbers.")
]
WhatIfOption = Annotated[
    str | None,
    typer.Option(
        "--whatif",
        help="`rerun`: repeat its calls and compare; or `turn=2 n=4 T=1 seed=0 model=RUN@best edit=TEXT`.",
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option("--verify", help="Run its tool calls again and compare; exit 1 if one diverged."),
]
ScriptOption = Annotated[
    Path | None, typer.Option(help="With --whatif: replies of `model=scripted`, a JSON list.")
]
SvgOption = Annotated[Path | None, typer.Option(help="Write the screen as an SVG file and leave.")]

MaskOption = Annotated[
    bool,
    typer.Option(
        "--mask/--no-mask",
        help="With --svg: refuse episodes that contain what looks like a secret.",
    ),
]


def command(
    episode: EpisodeArgument = None,
    run: RunOption = None,
    filter_: FilterOption = "",
    sort: SortOption = "-time",
    layer: LayerOption = "",
    plain: PlainOption = False,
    tokens: TokensOption = False,
    whatif: WhatIfOption = None,
    script: ScriptOption = None,
    verify: VerifyOption = False,
    json: JsonOption = False,
    svg: SvgOption = None,
    mask: MaskOption = True,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Step through an episode: turns, tool calls, each token with its training numbers, reward, siblings.

    --json prints what `agentrl show --json` prints.
    --verify prints `diverged at call n` if a recorded call answers differently now; it stores nothing.
    --whatif runs recorded calls again or samples again from a turn, in a separate process; results are stored as
    children of the episode. With --json it prints one event a line: {"ev": "rerun" | "rewards" | "child" | "done", …}.
    """
    if not mask and svg is None:
        raise UsageError(
            "--no-mask works only with --svg.", hint="The screen itself masks nothing."
        )
    path = find_db(project, db)
    if whatif is not None or verify:
        request = _request(whatif, verify)
        raise typer.Exit(
            _whatif(path, episode or "last", run, request, script, project, as_json=json)
        )
    if tokens or (svg is None and (plain or json or not is_terminal())):
        listed = episode is None or (filter_ and episode == "last")
        wanted = _first(path, run, filter_, sort) if listed else episode or "last"
        if json and not tokens:
            _print_json(path, wanted, run)
        else:
            _print(path, wanted, run, layer, tokens)
        return
    _open(path, episode, run, filter_, sort, svg, mask)


def _open(
    path: Path,
    episode: str | None,
    run: str | None,
    filter_: str,
    sort: str,
    svg: Path | None,
    mask: bool,
) -> None:
    """Open the screen, or write it as an SVG file. Raises UsageError if `mask` and the picture shows a secret."""
    from agentrl_cli.store import Store
    from agentrl_cli.tui.common.load_episode import holds_secret

    with Store.open(path, readonly=True) as store:
        run_id = store.runs.get(run).id if run else None
        if filter_:
            store.episodes.ids(filter_, sort, run=run_id)  # reports a typo before the screen opens
        if (filter_ and episode == "last") or (episode is None and svg is not None):
            episode = _first_of(store, run_id, filter_, sort)
        found = store.episodes.resolve(episode, run_id) if episode else None
        if svg is not None and mask and found is not None and holds_secret(store, found):
            hint = f"`agentrl export {found} --format html -o FILE` masks it; --no-mask writes the picture anyway."
            raise UsageError(
                f"{found} contains what looks like a secret, and a picture masks nothing.",
                hint=hint,
            )
    place = _place(episode or "")
    from agentrl_cli.tui.app import AgentApp, save_svg
    from agentrl_cli.tui.common.episode_list import Browse
    from agentrl_cli.tui.replay.screen import ReplayScreen
    from agentrl_cli.tui.runs.episodes import EpisodesScreen

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


def _first(path: Path, run: str | None, filter_: str, sort: str) -> str:
    """Return the first episode of the list; raises NotFound if the filter matches none."""
    from agentrl_cli.store import Store

    with Store.open(path, readonly=True) as store:
        return _first_of(store, store.runs.get(run).id if run else None, filter_, sort)


def _first_of(store: Store, run_id: str | None, filter_: str, sort: str) -> str:
    found = store.episodes.ids(filter_, sort, run=run_id)[:1]
    if not found:
        raise NotFound(f"No episode matches {filter_!r}." if filter_ else "No episodes yet.")
    return store.episodes.rows(found)[0].id


def _request(whatif: str | None, verify: bool) -> list[str]:
    """Return the arguments for the child process. Raises UsageError."""
    from agentrl_cli.tui.whatif.client import whatif_arguments

    if whatif is None:
        return ["--verify"]
    if verify:
        raise UsageError(
            "--verify runs the calls again, as `--whatif rerun` does: give only one of the two."
        )
    return whatif_arguments(whatif)


def _whatif(
    path: Path,
    episode: str,
    run: str | None,
    request: list[str],
    script: Path | None,
    project: Path | None,
    *,
    as_json: bool,
) -> int:
    """Runs the child process and prints its events. Returns the exit status."""
    import asyncio

    from agentrl_cli.store import Store
    from agentrl_cli.tui.chat.client import ChatClient
    from agentrl_cli.tui.whatif.client import MODULE
    from agentrl_cli.tui.whatif.view import event_lines

    with Store.open(path, readonly=True) as store:
        found = store.episodes.resolve(episode, store.runs.get(run).id if run else None)
    arguments = ["--db", str(path), "--episode", found, *request]
    arguments += ["--script", str(script)] if script is not None else []
    arguments += ["--project", str(project)] if project is not None else []

    async def go() -> int:
        ran = diverged = 0
        client = ChatClient(arguments, MODULE)
        try:
            await client.start()
            async for event in client.events():
                if event["ev"] == "fatal":
                    error = AgentRLError(event["message"], hint=event["hint"])
                    error.exit_code = event["code"]
                    raise error
                ran += event["ev"] == "rerun"
                diverged += event["ev"] == "rerun" and not event["same"]
                if as_json:
                    echo_jsonl([event])
                else:
                    for line in event_lines(event, 120):
                        echo(line.plain)
        finally:
            await client.kill()
        if request != ["--verify"]:
            return 0
        same = (
            f"all {ran} calls answer as recorded"
            if ran
            else "the episode has no tool calls to run again"
        )
        narrate(f"{diverged} of {ran} calls diverged" if diverged else same)
        return 1 if diverged else 0

    return asyncio.run(go())


def _print_json(path: Path, episode: str, run: str | None) -> None:
    from agentrl_cli.reports.export import episode_object
    from agentrl_cli.store import Store

    with Store.open(path, readonly=True) as store:
        found = store.episodes.resolve(episode, store.runs.get(run).id if run else None)
        echo_json(episode_object(store.episodes.get(found), store.signals.get(found), tokens=False))


def _print(path: Path, episode: str, run: str | None, layer: str, tokens: bool) -> None:
    """Prints the episode as text, as wide as the terminal, 100 columns in a pipe."""
    from agentrl_cli.commands.common import STEERS, console
    from agentrl_cli.store import Store
    from agentrl_cli.tui.common.layers import LAYERS
    from agentrl_cli.tui.replay.plain import replay_lines, token_rows

    if layer and layer not in LAYERS:
        raise UsageError(f"Unknown layer {layer!r}.", hint=f"Layers: {', '.join(LAYERS)}.")
    with Store.open(path, readonly=True) as store:
        found = store.episodes.resolve(episode, store.runs.get(run).id if run else None)
        if tokens:
            echo_jsonl(token_rows(store, found))
            return
        out = console()
        width = out.width if out.is_terminal else 100
        for text in replay_lines(store, found, layer=layer, width=width):
            if out.is_terminal:
                text.plain = STEERS.sub(
                    lambda found: " " * len(found[0]), text.plain
                )  # same length: keeps styles
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
