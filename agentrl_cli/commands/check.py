"""`agentrl check`: validates a pack, and estimates from a few rollouts whether a training has something to learn."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import (
    Context,
    JsonOption,
    ModelOption,
    data_stdout,
    echo_json,
    narrate,
    warn,
    warn_unsafe,
)
from agentrl_cli.commands.options import SettingsOptions, refuse_idle
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import EnvironmentProblem, ModelError, PolicyError, pluralise
from agentrl_cli.paths import find_pack, find_project, portable

if TYPE_CHECKING:
    from agentrl_cli.config import SandboxConfig
    from agentrl_cli.runtime import Runtime

ROLLOUTS = 16
RolloutsOption = Annotated[
    int,
    typer.Option(
        "--rollouts", min=0, help="Rollouts that estimate what a training can learn from; 0: none."
    ),
]


def command(
    packs: Annotated[
        list[str] | None, typer.Argument(help="Packs by name or folder; default: this project's.")
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Run solution and empty answer on all rows, not 4 a family."),
    ] = False,
    attack: Annotated[
        bool, typer.Option("--attack", help="Attack the graders with answers that solve nothing.")
    ] = False,
    rollouts: RolloutsOption = ROLLOUTS,
    model: ModelOption = None,
    as_json: JsonOption = False,
    *,
    where: SettingsOptions,
) -> None:
    """Validate packs: rows, schema, that the reference solution scores 1 and an empty answer 0. Exit 1 on a problem.

    In a project without problems, the model then makes 16 rollouts, 4 at each of 4 tasks, which are kept in the store:
    how many groups of a training will have solved and unsolved episodes, and what to do if none has.

    --attack plays answers that solve nothing (constants, the question, lists, code that leaves before the tests, orders
    to a judge …) at six tasks: a grader that pays one, fails at it, or grades one attempt in two ways has a problem.

    JSON: [{"pack": "code-task", "folder": "…", "solver": true, "agent": "", "own_answer": "",
    "problems": [{"where": "data/train.jsonl:3", "text": "…"}],
    "spread": {"rollouts": 16, "solved": 3, "chance": 0.6, "verdict": "ready", "finding": null, …}}]; spread is null if
    no rollout was made; its finding is as in `agentrl why --json`
    """
    chosen = {"--model": model, "--rollouts": rollouts not in (0, ROLLOUTS)}
    refuse_idle("for packs by name, of which no rollout is made", chosen if packs else {})
    refuse_idle("with --rollouts 0", {"--model": not rollouts and model})
    folder = find_project(override=where.project)
    context = where.open(required=not packs)
    folders = [find_pack(name, folder) for name in packs or context.config.task.packs]
    with data_stdout():
        results = asyncio.run(_check(folders, context.config.sandbox, every, attack))
        if not as_json:
            _report(results)
        sound = not any(result["problems"] for result in results)
        trying = rollouts > 0 and sound and packs is None
        for result in results:
            result["spread"] = _try(context, result, model, rollouts, as_json) if trying else None
        if as_json:
            echo_json(results)
    if not sound:
        raise typer.Exit(1)


def _try(
    context: Context, result: dict[str, Any], model: str | None, rollouts: int, as_json: bool
) -> dict[str, Any] | None:
    """Make rollouts of one pack, print their meaning for a training, and return it; None if no model can be loaded."""
    from agentrl_cli.commands.rollout import sample
    from agentrl_cli.evaluate.reward_spread import ATTEMPTS, estimate, summary
    from agentrl_cli.reports.diagnosis import diagnose, first_fault, report
    from agentrl_cli.reports.findings import reasons
    from agentrl_cli.reports.read_evidence import read_evidence
    from agentrl_cli.store import Store
    from agentrl_cli.tasks import load_pack
    from agentrl_cli.trainer.metrics import step_metrics
    from agentrl_cli.types import group_pairs

    name = model or context.config.model.name
    tasks = max(1, rollouts // ATTEMPTS)
    config = context.config.model_copy(deep=True)
    config.task.packs = portable([result["folder"]], (context.project,))
    try:
        here = dataclasses.replace(context, config=config)
        size, split = min(ATTEMPTS, rollouts), config.task.split_train
        run, episodes = asyncio.run(
            sample(here, model, tasks, size, split, True, partial(_report_template, result["pack"]))
        )
    except (ModelError, EnvironmentProblem, PolicyError) as problem:
        warn(f"{result['pack']}: no rollout was made. {problem.message} {problem.hint}".rstrip())
        return None
    found = estimate(episodes, config.rollout.group_size)
    groups = group_pairs((episode.task_id, episode) for episode in episodes)
    trained = float(sum(episode.graded for episode in episodes))
    # the rollouts as a step that trained on them
    step = {**step_metrics(list(groups.values()), {}), "step": 1, "facts/trained": trained}
    with Store.open(context.db, readonly=True) as store:
        evidence = read_evidence(store, run, [step])
    rows = load_pack(Path(result["folder"])).tasks(config.task.split_train)  # not only those tried
    known = {**evidence.tasks, **{task.id: task for task in rows}}
    cause = first_fault(diagnose(dataclasses.replace(evidence, tasks=known)))
    if not as_json:
        tried = f"{pluralise(found.rollouts, 'rollout')} ({pluralise(found.tasks, 'task')})"
        solved = f"{name} solved {found.solved} of {tried}"
        failed = "; ".join(f"in {number}, {text}" for text, number, _ in reasons(episodes)[:4])
        others = f"the others: {failed}" if failed else ""
        for line in (solved, others, summary(found), cause.line if cause else ""):
            if line:
                narrate(f"{result['pack']}: {line}")
    finding = report(cause) if cause else None
    return {**dataclasses.asdict(found), "verdict": found.verdict, "finding": finding}


def _report_template(pack: str, runtime: Runtime) -> None:
    """Print what the template of a model in this process lacks for the tools of a pack."""
    from agentrl_cli.chat.audit import audit

    if runtime.loaded.model is None or not any(one.tools for one in runtime.packs.values()):
        return
    found = audit(runtime.loaded.chat)
    for note in () if found.supports_tools and found.reads_calls else found.notes:
        warn(f"{pack}: {note}")


async def _check(
    folders: list[Path], settings: SandboxConfig, every: bool, attack: bool
) -> list[dict[str, Any]]:
    from agentrl_cli.evaluate.grader_attacks import attack_graders, own_answer
    from agentrl_cli.evaluate.pack_check import check_pack
    from agentrl_cli.sandbox import Sandbox
    from agentrl_cli.tasks import load_pack

    results: list[dict[str, Any]] = []
    packs = [load_pack(folder) for folder in folders]
    async with AsyncExitStack() as stack:
        sandbox = None
        if any(pack.sandbox for pack in packs):
            sandbox = await stack.enter_async_context(await Sandbox.open(settings))
        warn_unsafe(sandbox)
        for pack in packs:
            narrate(f"checking {pack.name} …")
            agent = pack.agent.text if pack.agent is not None else ""
            found = {"pack": pack.name, "folder": str(pack.dir), "solver": pack.solver}
            with Progress(f"checking {pack.name}", bar=False):  # its code may draw one
                problems = await check_pack(pack, sandbox, every=every)
                own = ""
                if not problems and pack.agent is None and (attack or not pack.solver):
                    tasks = pack.read("train")[0]
                    own = "" if pack.solver else await own_answer(pack, sandbox, tasks)
                    problems = await attack_graders(pack, sandbox, tasks) if attack else problems
            results.append({**found, "agent": agent, "own_answer": own, "problems": problems})
    return results


def _report(results: list[dict[str, Any]]) -> None:
    from agentrl_cli.types import group_pairs

    for result in results:
        # the same problem in several places is one line
        places = group_pairs((problem.text, problem.where) for problem in result["problems"])
        for text, where in places.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            narrate(f"{result['pack']}: {where[0]}{more}: {text}")
        if not result["solver"]:
            untried = "task.py has no `solve(row)`" + (
                f"; {result['own_answer']}"
                if result["own_answer"]
                else ", so it is untested that a right answer scores 1"
            )
            if result["agent"]:
                untried = f"its episodes are made by {result['agent']}, which only rollouts run"
            narrate(f"{result['pack']}: {untried}")
        count = len(result["problems"])
        narrate(
            f"{result['pack']}: "
            + (f"{count} problem{'s' if count > 1 else ''}" if count else "fine")
        )
