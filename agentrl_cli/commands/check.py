"""`agentrl check`: validates a pack's rows, schema, reference solutions and empty answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    JsonOption,
    ProjectOption,
    SetOption,
    data_stdout,
    echo_json,
    narrate,
    open_project,
    warn_unsafe,
)
from agentrl_cli.paths import find_pack, find_project

if TYPE_CHECKING:
    from agentrl_cli.config import SandboxConfig

EveryOption = Annotated[
    bool, typer.Option("--all", help="Run the solution and the empty answer on all rows, not just 4 of each family.")
]
PacksArgument = Annotated[list[str] | None, typer.Argument(help="Packs by name or folder; default: this project's.")]


def command(
    packs: PacksArgument = None,
    every: EveryOption = False,
    project: ProjectOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Validate packs: rows, schema, that the reference solution scores 1 and an empty answer 0. Exit 1 on a problem.

    JSON: [{"pack": "code-task", "solver": true, "agent": "",
    "problems": [{"where": "data/train.jsonl:3", "text": "…"}]}]
    """
    folder = find_project(override=project)
    context = open_project(project, None, config, sets, required=not packs)
    names = packs or context.config.task.packs
    folders = [find_pack(name, folder) for name in names]
    with data_stdout():
        results = asyncio.run(_check(folders, context.config.sandbox, every))
        if as_json:
            echo_json(results)
        else:
            _report(results)
    if any(result["problems"] for result in results):
        raise typer.Exit(1)


async def _check(folders: list[Path], settings: SandboxConfig, every: bool) -> list[dict[str, Any]]:
    from agentrl_cli.analysis.pack_check import check_pack
    from agentrl_cli.sandbox import Sandbox
    from agentrl_cli.tasks import load_pack

    results: list[dict[str, Any]] = []
    packs = [load_pack(folder) for folder in folders]
    sandbox = await Sandbox.open(settings) if any(pack.sandbox for pack in packs) else None
    warn_unsafe(sandbox)
    try:
        for pack in packs:
            narrate(f"checking {pack.name} …")
            problems = await check_pack(pack, sandbox, every=every)
            agent = pack.agent.text if pack.agent is not None else ""
            results.append({"pack": pack.name, "solver": pack.solver, "agent": agent, "problems": problems})
    finally:
        if sandbox is not None:
            await sandbox.close()
    return results


def _report(results: list[dict[str, Any]]) -> None:
    for result in results:
        places: dict[str, list[str]] = {}  # the same problem in several places is one line
        for problem in result["problems"]:
            places.setdefault(problem.text, []).append(problem.where)
        for text, where in places.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            narrate(f"{result['pack']}: {where[0]}{more}: {text}")
        if not result["solver"]:
            untried = "task.py has no `solve(row)`, so it is untested that a right answer scores 1"
            if result["agent"]:
                untried = f"its episodes are made by {result['agent']}, which was not run: `agentrl rollout -n 1` does"
            narrate(f"{result['pack']}: {untried}")
        count = len(result["problems"])
        narrate(f"{result['pack']}: " + (f"{count} problem{'s' if count > 1 else ''}" if count else "fine"))
