"""`agentrl replay`: step through an episode, token by token."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    JsonOption,
    console,
    echo,
    echo_jsonl,
    is_terminal,
    narrate,
)
from agentrl_cli.commands.options import RunStoreOptions, refuse_idle
from agentrl_cli.commands.place import place_in
from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.tui.common.plain_text import STEERS

if TYPE_CHECKING:
    from agentrl_cli.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """The episodes that n and N step through."""

    filter: Annotated[
        str, typer.Option("--filter", "-f", help="Episodes for n/N and the list: reward:<0.5 …")
    ] = ""
    sort: Annotated[str, typer.Option(help="Order of the list: -time, reward, -tokens …")] = "-time"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainOptions:
    """The output in place of the screen."""

    plain: Annotated[bool, typer.Option("--plain", help="Print it; no screen.")] = False
    layer: Annotated[str, typer.Option(help="What to colour tokens by, with --plain.")] = ""
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Print every token as a JSON line, with all numbers."),
    ] = False
    json: JsonOption = False
    svg: Annotated[Path | None, typer.Option(help="Write the screen as an SVG file and leave.")] = (
        None
    )
    mask: Annotated[
        bool,
        typer.Option(
            "--mask/--no-mask",
            help="With --svg: refuse episodes that contain what looks like a secret.",
        ),
    ] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunOptions:
    """The calls and turns that are repeated."""

    whatif: Annotated[
        str | None,
        typer.Option(
            "--whatif",
            help="`rerun`: repeat its calls and compare; or `turn=2 n=4 T=1 seed=0 model=RUN@best edit=TEXT`.",
        ),
    ] = None
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Run its tool calls again and compare; exit 1 if one diverged."
        ),
    ] = False
    script: Annotated[
        Path | None,
        typer.Option(help="With --whatif: replies of `model=scripted`, a JSON list."),
    ] = None


def command(
    episode: Annotated[
        str | None,
        typer.Argument(
            help="An episode: id, unique prefix, link, or last, best, worst. None: the list.",
            autocompletion=completion.episodes,
        ),
    ] = None,
    *,
    listed: ListOptions,
    shown: PlainOptions,
    again: RerunOptions,
    where: RunStoreOptions,
) -> None:
    """Step through an episode: turns, tool calls, each token with its training numbers, reward, siblings.

    A file in place of an episode is opened without a project (trajectory.json and other traces, docs/formats.md).

    --json prints what `agentrl show --json` prints.
    --verify prints `diverged at call n` if a recorded call answers differently now; it stores nothing.
    --whatif runs recorded calls again or samples again from a turn, in a separate process; results are stored as
    children of the episode. With --json it prints one event a line: {"ev": "rerun" | "rewards" | "child" | "done", …}.
    """
    no_mask = shown.svg is None and not shown.mask
    refuse_idle("without --svg: the screen masks nothing", {"--no-mask": no_mask})
    printed = {"--plain": shown.plain, "--tokens": shown.tokens, "--json": shown.json}
    refuse_idle("with --svg", printed if shown.svg is not None else {})
    refuse_idle("without --whatif", {"--script": again.whatif is None and again.script})
    if again.whatif is not None or again.verify:
        idle = {"--filter": listed.filter, "--layer": shown.layer, "--tokens": shown.tokens}
        refuse_idle("when calls run again", {**idle, "--svg": shown.svg})
        raise typer.Exit(_rerun(where, episode or "last", again, as_json=shown.json))
    file = Path(episode or "").expanduser()
    if file.suffix[:5] == ".json" and not file.is_file():
        raise NotFound.of("file", str(file), [str(one) for one in file.parent.glob("*.json*")])
    if episode and file.is_file():
        with _open_file(file) as (db, found):
            one = found[0] if len(found) == 1 or not is_terminal() else None
            return _show(replace(where, db=db, project=None), one, listed, shown)
    _show(where, episode, listed, shown)


@contextmanager
def _open_file(file: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a store that lasts as long, with the episodes of a file, and their ids. Raises UsageError, DataError."""
    from agentrl_cli.commands.imported import read_file
    from agentrl_cli.store import Store

    with tempfile.TemporaryDirectory(prefix="agentrl-replay-") as folder:
        db = Path(folder) / "agentrl.db"
        with Store.open(db) as store:
            found = read_file(file, store)
        yield db, found


def _show(
    where: RunStoreOptions, episode: str | None, listed: ListOptions, shown: PlainOptions
) -> None:
    """Print an episode, or open the screen on it or on the list."""
    with where.open() as store:
        run_id = where.run_id(store)
        if listed.filter:
            store.episodes.ids(listed.filter, listed.sort, run=run_id)  # reports a typo first
        printed = shown.tokens or (
            shown.svg is None and (shown.plain or shown.json or not is_terminal())
        )
        if (listed.filter and episode == "last") or (
            episode is None and (printed or shown.svg is not None)
        ):
            found: str | None = _first_of(store, run_id, listed)
        else:
            found = store.episodes.resolve(episode, run_id) if episode else None
        refuse_idle("on the screen", {"--layer": not printed and shown.layer})
        if printed and found is not None:
            return _print(store, found, shown)
        if shown.svg is not None and shown.mask and found is not None:
            _require_no_secret(store, found)
    browse = listed.filter, listed.sort, run_id
    _open(where.find(), found, browse, place_in(episode or ""), shown.svg)


def _first_of(store: Store, run_id: str | None, listed: ListOptions) -> str:
    """Return the first episode of the list. Raises NotFound if there is none."""
    found = store.episodes.ids(listed.filter, listed.sort, run=run_id)[:1]
    if not found:
        raise NotFound(
            f"No episode matches {listed.filter!r}." if listed.filter else "No episodes yet."
        )
    return store.episodes.rows(found)[0].id


def _require_no_secret(store: Store, episode: str) -> None:
    from agentrl_cli.tui.common.reader import holds_secret

    if holds_secret(store, episode):
        raise UsageError(
            f"{episode} contains what looks like a secret, and a picture masks nothing.",
            hint=f"`agentrl export {episode} --format html -o FILE` masks it; --no-mask writes the picture anyway.",
        )


def _print(store: Store, episode: str, shown: PlainOptions) -> None:
    """Print the episode as text, as wide as the terminal, 100 columns in a pipe; or as JSON."""
    from agentrl_cli.commands.show import print_episode_json
    from agentrl_cli.tui.common.layers import LAYERS
    from agentrl_cli.tui.replay.plain import replay_lines, token_rows

    if shown.layer and shown.layer not in LAYERS:
        raise UsageError(f"Unknown layer {shown.layer!r}.", hint=f"Layers: {', '.join(LAYERS)}.")
    whole = shown.tokens or shown.json
    refuse_idle("with --tokens or --json", {"--layer": whole and shown.layer})
    if shown.tokens:
        return echo_jsonl(token_rows(store, episode))
    if shown.json:
        return print_episode_json(store, episode)
    out = console()
    width = out.width if out.is_terminal else 100
    for text in replay_lines(store, episode, layer=shown.layer, width=width):
        if out.is_terminal:
            text.plain = STEERS.sub(
                lambda found: " " * len(found[0]), text.plain
            )  # same length: keeps styles
            out.print(text, soft_wrap=True)
        else:
            echo(text.plain)


def _open(
    path: Path,
    episode: str | None,
    listed: tuple[str, str, str | None],
    place: tuple[int, int] | None,
    svg: Path | None,
) -> None:
    """Open the screen, or write it as an SVG file."""
    from agentrl_cli.tui.app import AgentApp, save_svg
    from agentrl_cli.tui.common.episode_list import Browse
    from agentrl_cli.tui.replay.screen import ReplayScreen
    from agentrl_cli.tui.runs.screen import EpisodesScreen

    browse = Browse(*listed)
    if episode is None:
        AgentApp(path, lambda reader: EpisodesScreen(reader, browse)).run()
        return
    app = AgentApp(path, lambda reader: ReplayScreen(reader, episode, browse, place))
    if svg is None:
        app.run()
        return
    save_svg(app, svg, f"agentrl replay {episode}")
    narrate(f"wrote {svg}")


def _rerun(where: RunStoreOptions, episode: str, again: RerunOptions, *, as_json: bool) -> int:
    """Run the child process and print its events. Returns the exit status."""
    import asyncio

    from agentrl_cli.tui.whatif.view import event_lines, stream_events, whatif_arguments

    refuse_idle("with --whatif", {"--verify": again.whatif is not None and again.verify})
    request = ["--verify"] if again.whatif is None else whatif_arguments(again.whatif)
    with where.open() as store:
        found = store.episodes.resolve(episode, where.run_id(store))
    arguments = ["--db", str(where.find()), "--episode", found, *request]
    arguments += ["--script", str(again.script)] if again.script is not None else []
    arguments += ["--project", str(where.project)] if where.project is not None else []

    async def run() -> tuple[int, int]:
        ran = diverged = 0
        async for event in stream_events(arguments):
            ran += event["ev"] == "rerun"
            diverged += event["ev"] == "rerun" and not event["same"]
            if as_json:
                echo_jsonl([event])
            else:
                for line in event_lines(event, 120):
                    echo(line.plain)
        return ran, diverged

    ran, diverged = asyncio.run(run())
    if not again.verify:
        return 0
    same = (
        f"all {ran} calls answer as recorded"
        if ran
        else "the episode has no tool calls to run again"
    )
    narrate(f"{diverged} of {ran} calls diverged" if diverged else same)
    return 1 if diverged else 0
