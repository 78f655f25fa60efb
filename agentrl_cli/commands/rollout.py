"""`agentrl rollout`: sample episodes into the store, and list them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import (
    AgentOption,
    Context,
    JsonOption,
    data_stdout,
    echo_json,
    narrate,
    warn,
)
from agentrl_cli.commands.options import ModelOptions, NoToolsOption, TemperatureOption
from agentrl_cli.commands.progress import Progress, load_runtime
from agentrl_cli.commands.tables import print_rows
from agentrl_cli.errors import DataError, RunFailed, pluralise

if TYPE_CHECKING:
    from agentrl_cli.runtime import Runtime
    from agentrl_cli.store import RunRow
    from agentrl_cli.types import Episode, Task


def command(
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Tasks to attempt.")] = 16,
    group: Annotated[
        int, typer.Option("--group", "-g", min=1, max=2**16, help="Attempts at each task.")
    ] = 1,
    split: Annotated[
        str, typer.Option("--split", help="train, validation, test or heldout.")
    ] = "train",
    temperature: TemperatureOption = None,
    no_tools: NoToolsOption = False,
    agent: AgentOption = None,
    as_json: JsonOption = False,
    *,
    work: ModelOptions,
) -> None:
    """Sample episodes into the store and print a line for each. `agentrl replay last` opens the newest."""
    model = work.model
    context = work.open({"rollout.temperature": temperature, "task.agent": agent})
    with data_stdout():
        run, episodes = asyncio.run(sample(context, model, count, group, split, not no_tools))
        if as_json:
            echo_json({"run": run.name, "episodes": [_line(episode) for episode in episodes]})
        else:
            _print(episodes)
    if not as_json:
        narrate(
            f"{pluralise(len(episodes), 'episode')} of {run.name} in {context.db}; look inside one: agentrl replay last"
        )
    if not any(episode.graded for episode in episodes):
        first = next((episode for episode in episodes if episode.error), episodes[0])
        raise RunFailed(
            f"No episode could be graded (of {len(episodes)}); the first: {first.outcome}: {first.error}",
            hint="agentrl replay last",
        )


async def sample(
    context: Context,
    model: str | None,
    count: int,
    group: int,
    split: str,
    tools: bool,
    on_load: Callable[[Runtime], None] = lambda runtime: None,
) -> tuple[RunRow, list[Episode]]:
    """`group` attempts at each of `count` tasks, as a run in the store."""
    async with load_runtime(context, context.config, model) as runtime:
        on_load(runtime)
        return await _attempt(runtime, context, count, group, split, tools)


async def _attempt(
    runtime: Runtime, context: Context, count: int, group: int, split: str, tools: bool
) -> tuple[RunRow, list[Episode]]:
    from agentrl_cli.rollout import Job, seed_of
    from agentrl_cli.store.new_run import new_run

    config = runtime.config
    tasks = _tasks(runtime, split, count)
    runtime.store.tasks.add(tasks)
    run = new_run(
        config,
        runtime.store,
        kind="rollout",
        packs=list(runtime.packs),
        tokenizer=runtime.loaded.hash,
        model=runtime.loaded.name,
    )
    jobs = [
        Job(task, seed_of(config.seed, "rollout", task.id, n), n, f"rollout-{at:05d}", 0, run.id)
        for at, task in enumerate(tasks)
        for n in range(group)
    ]
    narrate(
        f"{run.name}: {pluralise(len(jobs), 'episode')} of {runtime.loaded.name}, {group} at each of"
        f" {pluralise(len(tasks), 'task')} of {split} …"
    )
    rollout = runtime.rollout().with_(run=run, with_tools=tools)
    status, error = "stopped", "interrupted"
    with runtime.store.claims.hold(run.id, "rollout"):
        try:
            with Progress("rollout", len(jobs)) as progress:
                episodes = await rollout.run(jobs, lambda episode: progress.advance())
            status, error = "finished", ""
        finally:
            runtime.store.runs.update(run.id, status=status, error=error, ended=time.time())
    if rollout.foreign:
        warn(rollout.foreign)
    return run, episodes


def _tasks(runtime: Runtime, split: str, count: int) -> list[Task]:
    """Return the first tasks of every pack in turn, at most `task.limit` of each and `count` of all."""
    config = runtime.config.task
    packs = [
        pack.tasks(split, families=config.families, limit=config.limit)
        for pack in runtime.packs.values()
    ]
    tasks = [task for row in itertools.zip_longest(*packs) for task in row if task is not None]
    if not tasks:
        raise DataError(f"No tasks in split {split}.", hint="`agentrl check` validates the data.")
    if len(tasks) < count:
        limited = " under task.limit" if config.limit is not None else ""
        narrate(
            f"The split {split} has {pluralise(len(tasks), 'task')}{limited}; {count} were requested."
        )
    return tasks[:count]


def _line(episode: Episode) -> dict[str, Any]:
    return {
        "id": episode.id,
        "task": episode.task_id,
        "sample": episode.sample,
        "outcome": str(episode.outcome),
        "reward": episode.reward,
        "turns": len(episode.turns),
        "tokens": len(episode.tokens),
        "sampled": episode.trained_tokens,
        "calls": episode.tool_calls,
        "tool_errors": episode.tool_errors,
        "error": episode.error,
    }


def _print(episodes: list[Episode]) -> None:
    lines = [_line(episode) for episode in episodes]
    names = [name for name in lines[0] if name != "error"] if lines else []
    print_rows(
        names,
        [[line[name] for name in names] for line in lines],
        least=["sampled", "tokens", "sample"],
    )
    counted = Counter(str(episode.outcome) for episode in episodes)
    narrate("  ".join(f"{name} {number}" for name, number in counted.most_common()))
    for error in sorted({episode.error for episode in episodes if episode.error}):
        warn(error)
