"""Score sets of a training: its episodes under other weights, other reward functions or other estimators, stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config, load_config
from agentrl_cli.errors import EnvError, NotFound
from agentrl_cli.reports.rescore import Change, changes, rescore_parts, reward_of
from agentrl_cli.rewards import Reward
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.store import RunRow, Score, Store
from agentrl_cli.tasks import load_pack
from agentrl_cli.types import Episode, RewardPart


@dataclass(frozen=True, slots=True)
class ScoreSet:
    """The changes under which a training's episodes are scored again."""

    sets: Sequence[str] = ()
    """Settings, `key=value`."""
    rewards: Sequence[str] = ()
    """Functions as `reward_of` reads them."""
    filter: str = ""
    advantage: str | None = None
    """Another estimator; None: the training's own."""

    @property
    def name(self) -> str:
        """Return a short name for the changes."""
        words = [text.removeprefix("rewards.") for text in self.sets]
        words += [text.rpartition(":")[2] for text in self.rewards]
        return " ".join([*words, *filter(None, [self.advantage])]) or "again"


def score_again(
    store: Store,
    run: RunRow,
    wanted: ScoreSet,
    *,
    project: Path | None,
    store_as: str | None,
    on_sandbox: Callable[[Sandbox], None],
) -> tuple[str | None, list[Change]]:
    """Return the name of the new score set, and the episodes that match the filter under it.

    `store_as`: "" names it after its changes; None stores nothing, and the name is None. `on_sandbox` gets the sandbox
    that functions grade code in, if one does. Raises NotFound, ConfigError, EnvError.
    """
    episodes, matching = _episodes(store, run, wanted.filter)
    config, _ = load_config(
        (),
        wanted.sets,
        {},
        {"algo.advantage": wanted.advantage},
        base=project or Path.cwd(),
        run=run.config,
    )
    base = project or Path(store.path).parent.parent
    functions = []
    for text in wanted.rewards:
        file = Path(
            text.rpartition("=")[2].partition(":")[0]
        )  # in the working folder, or the project
        functions.append(reward_of(text, Path.cwd() if file.is_file() else base, config.rewards))
    known = {part.name for episode in episodes for part in episode.reward_parts}
    known |= {*(reward.name for reward in functions), *(run.config.get("rewards") or {})}
    for name in config.rewards:
        if name not in known:
            raise NotFound.of(f"reward part of {run.name}", name, sorted(known))
    scored = asyncio.run(_score(store, episodes, config, functions, project, on_sandbox))
    found = [change for change in scored if change.episode.id in matching]
    if store_as is None:
        return None, found
    spec = {"set": list(wanted.sets), "reward": list(wanted.rewards), "filter": wanted.filter}
    spec["advantage"] = config.algo.advantage.name
    return _keep(store, run, store_as or wanted.name, found, spec), found


def _keep(
    store: Store, run: RunRow, name: str, found: Sequence[Change], spec: Mapping[str, Any]
) -> str:
    """Store a score set; return its name, numbered if taken. Ungraded episodes have no score."""
    rows = [
        Score(
            name=name,
            episode_id=change.episode.id,
            reward=reward,
            delta=delta,
            advantage=change.advantage,
            fact=change.fact,
            parts={part.name: [part.value, part.weight] for part in change.parts},
            turns=change.turns,
        )
        for change in found
        if (reward := change.reward) is not None and (delta := change.delta) is not None
    ]
    return store.scores.add(run.id, name, rows, spec)


def _episodes(store: Store, run: RunRow, filter: str) -> tuple[list[Episode], set[str]]:
    """Return all finished episodes of the steps in which the filter matches any, and the ids of the matches.

    Advantages compare within the group or the step, so siblings that the filter excludes are still needed.
    """
    finished = "kind:train -outcome:none"
    every = store.episodes.used(finished, "time", run.id)
    found = store.episodes.used(f"{finished} {filter}", "time", run.id)
    matching = {line.id: line.step for line in found}
    if not matching:
        raise NotFound(f"{run.name} has no finished episodes{' that match' if filter else ''}.")
    steps = set(matching.values())
    return [store.episodes.get(line.id) for line in every if line.step in steps], set(matching)


def grader_imports(packs: Sequence[str], project: Path | None) -> tuple[str, ...]:
    """Return the packages that the graders of the run's packs import in the sandbox; a deleted pack adds none."""
    found: set[str] = set()
    for name in packs:
        with suppress(NotFound):
            found |= set(load_pack(name, base=project).imports)
    return tuple(sorted(found))


async def _score(
    store: Store,
    episodes: Sequence[Episode],
    config: Config,
    functions: Sequence[Reward],
    project: Path | None,
    on_sandbox: Callable[[Sandbox], None],
) -> list[Change]:
    """Rescore, with a sandbox for functions that grade code, started at its first use."""
    opened: list[Sandbox] = []
    async with AsyncExitStack() as stack:

        async def session() -> Any:
            if not opened:
                opened.append(await Sandbox.open(config.sandbox))
                stack.push_async_callback(opened[0].close)
                on_sandbox(opened[0])
            made = await opened[0].session(imports=grader_imports(config.task.packs, project))
            stack.push_async_callback(made.close)
            return made

        parts: dict[str, tuple[RewardPart, ...]] = {}
        for episode in episodes:
            if not episode.graded:  # errors are never graded
                parts[episode.id] = ()
                continue
            task = store.tasks.get(episode.task_id, episode.pack) if functions else None
            given = (episode, task, config.rewards, functions, session)
            try:
                parts[episode.id] = await rescore_parts(*given)
            except EnvError as error:
                text = f"{error.message} (episode {episode.id})"
                raise EnvError(text, hint="Nothing was stored.") from error
        return changes(episodes, parts, config.algo, store)
