"""`agentrl rescore`: a run under other rewards or another estimator, without generating anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    SetOption,
    data_stdout,
    echo,
    echo_json,
    narrate,
    warn_unsafe,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.tables import aligned
from agentrl_cli.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from agentrl_cli.config import Config
    from agentrl_cli.reports.rescore import Change
    from agentrl_cli.rewards import Reward
    from agentrl_cli.store import RunRow, Store
    from agentrl_cli.types import Episode

RewardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        metavar="FN",
        help="module:object or file.py:fn; NAME=FN replaces a part; repeatable.",
    ),
]
AdvantageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--advantage", help="Another estimator: rloo, gigpo …; repeat to put several side by side."
    ),
]
FilterOption = Annotated[
    str, typer.Option("--filter", "-f", help="Only these episodes, e.g. step:10..20.")
]
NameOption = Annotated[str | None, typer.Option("--name", help="The name of the score set.")]


def command(
    run: Annotated[
        str,
        typer.Argument(
            help="A training: name, id or unique prefix; `last`.", autocompletion=completion.runs
        ),
    ] = "last",
    sets: SetOption = None,
    reward: RewardOption = None,
    advantage: AdvantageOption = None,
    filter: FilterOption = "",
    name: NameOption = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Store the result as a score set.")
    ] = True,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Episodes to print, most changed first.")
    ] = 20,
    project: ProjectOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Score a training's episodes again, with new weights (--set rewards.x=2), a new function or another estimator.

    Nothing is generated, and the original scores are kept. The result is a score set of the run: `show` and replay
    print it, and filters find it (`agentrl ls -f "delta:<0"`, `rescored:>0.5`). Several estimators make one set each,
    and one table: `--advantage rloo --advantage opo`.

    JSON: {"run", "set", "summary", "episodes": [{"episode", "reward_before", "reward", "delta", "advantage_before",
    "advantage", "turns", "fact_before", "fact", "parts"}]}; for several estimators a list of these.
    """
    from agentrl_cli.reports.rescore import summary
    from agentrl_cli.store import Store

    path = find_db(project, db)
    with data_stdout(), Store.open(path) as store:
        row = _training(store, run)
        episodes, asked = _episodes(store, row, filter)
        change = {"set": sets or [], "reward": reward or [], "filter": filter}
        results = [
            _one(
                store,
                row,
                episodes,
                asked,
                change | {"advantage": one},
                project,
                _called(name, one, advantage),
                keep,
            )
            for one in (advantage or [None])  # type: ignore[list-item]  # None: the run's own
        ]
        reports = [
            {
                "run": row.name,
                "set": stored,
                "summary": summary(found),
                "episodes": [c.report() for c in found],
            }
            for stored, found in results
        ]
    if json:
        echo_json(reports[0] if len(reports) == 1 else reports)
        return
    if len(results) == 1:
        _print(results[0][1], summary(results[0][1]), limit)
    else:
        _side_by_side(advantage or [], [found for _, found in results], limit)
    names = " ".join(f'"{stored}"' for stored, _ in results if stored)
    narrate(f'Kept as {names}: agentrl ls -f "delta:<0"' if names else "Nothing was stored.")


def _episodes(store: Store, row: RunRow, filter: str) -> tuple[list[Episode], set[str]]:
    """Return all finished episodes of the steps in which the filter matches any, and the ids of the matches.

    Advantages compare within the group or the step, so siblings that the filter excludes are still needed.
    """
    finished = "kind:train -outcome:none"
    every = store.episodes.rows(store.episodes.ids(finished, "time", run=row.id))
    found = store.episodes.ids(f"{finished} {filter}".strip(), "time", run=row.id)
    asked = {line.id: line.step for line in store.episodes.rows(found)}
    if not asked:
        raise NotFound(f"{row.name} has no finished episodes{' that match' if filter else ''}.")
    steps = set(asked.values())
    return [store.episodes.get(line.id) for line in every if line.step in steps], set(asked)


def _called(
    name: str | None, advantage: str | None, advantages: Sequence[str] | None
) -> str | None:
    """Return the given name, followed by the estimator if there are several."""
    return f"{name} {advantage}" if name and len(advantages or ()) > 1 else name


def _one(
    store: Store,
    row: RunRow,
    episodes: Sequence[Episode],
    asked: set[str],
    change: dict[str, Any],
    project: Path | None,
    name: str | None,
    keep: bool,
) -> tuple[str | None, list[Change]]:
    """One set of new scores: the name it is stored under (None if not stored) and the changes."""
    from agentrl_cli.reports.rescore import keep as keep_scores
    from agentrl_cli.reports.rescore import reward_of

    sets, reward, advantage = change["set"], change["reward"], change["advantage"]
    config = _settings(row, sets, advantage, project)
    base = project or Path(store.path).parent.parent
    functions = [reward_of(text, _base(text, base), config.rewards) for text in reward]
    _known(config, row, [part.name for e in episodes for part in e.reward_parts], functions)
    scored = asyncio.run(_scored(store, episodes, config, functions, project))
    found = [each for each in scored if each.episode.id in asked]
    if not keep:
        return None, found
    spec = {**change, "advantage": config.algo.advantage.name}
    return keep_scores(store, row.id, name or _name(sets, reward, advantage), found, spec), found


def _training(store: Store, name: str) -> RunRow:
    if name == "last":
        rows = [row for row in store.runs.all() if row.kind == "train"]
        if not rows:
            raise NotFound("No training to rescore.", hint="`agentrl train` starts one.")
        return max(rows, key=lambda row: row.started)
    row = store.runs.get(name)
    if row.kind != "train":
        raise ConfigError(
            f"{row.name} is a {row.kind}, not a training: its groups were not compared."
        )
    return row


def _settings(
    row: RunRow, sets: Sequence[str] | None, advantage: str | None, project: Path | None
) -> Config:
    """Return the run's own settings, with the requested changes."""
    from agentrl_cli.config import load_config

    changes = {"algo.advantage": advantage}
    config, _ = load_config((), sets or (), {}, changes, base=project or Path.cwd(), run=row.config)
    return config


def _base(text: str, project: Path) -> Path:
    """Return the folder of a reward file: the working folder if the file is there, else the project."""
    file = text.rpartition("=")[2].partition(":")[0]
    return Path.cwd() if (Path.cwd() / file).is_file() else project


def _known(config: Config, row: RunRow, parts: Sequence[str], functions: Sequence[Reward]) -> None:
    known = {*parts, *(reward.name for reward in functions), *(row.config.get("rewards") or {})}
    for name in config.rewards:
        if name not in known:
            raise NotFound.of(f"reward part of {row.name}", name, sorted(known))


def packages(config: Config, project: Path | None) -> tuple[str, ...]:
    """Packages that the graders of the run's packs import in the sandbox; a deleted pack adds none."""
    from agentrl_cli.tasks import load_pack

    found: set[str] = set()
    for name in config.task.packs:
        try:
            found |= set(load_pack(name, base=project).imports)
        except NotFound:
            continue
    return tuple(sorted(found))


async def _scored(
    store: Store,
    episodes: Sequence[Any],
    config: Config,
    functions: Sequence[Reward],
    project: Path | None,
) -> list[Change]:
    """Rescores, with a sandbox for functions that grade code, started at its first use."""
    from agentrl_cli.reports.rescore import rescore_run
    from agentrl_cli.sandbox import Sandbox

    opened: list[Any] = []
    sessions: list[Any] = []

    async def session() -> Any:
        if not opened:
            opened.append(await Sandbox.open(config.sandbox))
            warn_unsafe(opened[0])
        sessions.append(await opened[0].session(imports=packages(config, project)))
        return sessions[-1]

    try:
        return await rescore_run(store, episodes, config, functions, session)
    finally:
        for one in sessions:
            await one.close()
        for sandbox in opened:
            await sandbox.close()


def _name(sets: Sequence[str] | None, reward: Sequence[str] | None, advantage: str | None) -> str:
    """Return a short name for the changes."""
    words = [text.removeprefix("rewards.") for text in sets or ()]
    words += [text.rpartition(":")[2] for text in reward or ()] + ([advantage] if advantage else [])
    return " ".join(words) or "again"


def _print(found: Sequence[Change], total: dict[str, Any], limit: int) -> None:
    def moved(change: Change) -> tuple[float, float]:
        return abs(change.delta or 0.0), abs(
            (change.advantage or 0.0) - (change.episode.advantage or 0.0)
        )

    ranked = sorted(found, key=moved, reverse=True)[:limit]
    names = ["episode", "task", "step", "reward", "now", "delta", "adv", "now", "fact now"]
    rows = [
        [c.episode.id, c.episode.task_id, c.episode.step, c.episode.reward, c.reward, c.delta, c.episode.advantage,
         c.advantage, c.fact]
        for c in ranked
    ]  # fmt: skip
    for line in aligned(names, rows):
        echo(line, painted=True)
    before, after = total["reward_before"], total["reward"]
    narrate(
        f"{total['changed']} of {total['episodes']} rewards changed; mean {before:.3f} → {after:.3f}; trained"
        f" {total['trained_before']} → {total['trained']}; {total['sign_flips']} advantages changed their sign"
        if before is not None
        else f"None of {total['episodes']} episodes was graded."
    )


def _side_by_side(names: Sequence[str], results: Sequence[Sequence[Change]], limit: int) -> None:
    """One line per episode, one column per estimator; largest disagreement first."""
    rows = list(zip(*results, strict=True))

    def spread(row: Sequence[Change]) -> float:
        values = [c.advantage or 0.0 for c in row]
        return max(values) - min(values)

    lines = [
        [
            c[0].episode.id,
            c[0].episode.task_id,
            c[0].episode.step,
            c[0].reward,
            c[0].episode.advantage,
        ]
        + [one.advantage for one in c]
        for c in sorted(rows, key=spread, reverse=True)[:limit]
    ]
    for line in aligned(["episode", "task", "step", "reward", "trained with", *names], lines):
        echo(line, painted=True)
    narrate(
        f"Mean advantage of {len(rows)} episodes under each estimator; - if it would not train."
    )
