"""`agentrl optimize`: better prompts instead of better weights."""

from __future__ import annotations

import asyncio
import difflib
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    Context,
    JsonOption,
    data_stdout,
    echo,
    echo_json,
    narrate,
)
from agentrl_cli.commands.options import ModelOptions, refuse_idle
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.progress import load_runtime
from agentrl_cli.errors import GateNotMet
from agentrl_cli.plugins.prompts.plan import Plan


def command(
    write: Annotated[
        bool, typer.Option("--write", help="Put the best texts into the project.")
    ] = False,
    show: Annotated[
        str | None,
        typer.Option(
            "--show",
            help="Print the candidates of this search and leave.",
            autocompletion=completion.runs,
        ),
    ] = None,
    fail_under: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exit 4 if the best solves less of the test tasks."),
    ] = None,
    as_json: JsonOption = False,
    *,
    plan: Plan,
    work: ModelOptions,
) -> None:
    """Search for better texts of a pack by reflection on its episodes; a search that was killed is continued.

    Every evaluation is an episode of the run, tagged `prompt:ID`. Base and best are compared on the test split.

    JSON: {"run", "base", "best", "parts", "validation", "test": {"tasks", "ungraded", "base", "best", "difference",
    "p_value"}, "episodes", "reflections", "written"}; with --show {"run", "best", "candidates": [{"id", "parent_id",
    "scores", "parts", …}]}
    """
    if show is not None:
        refuse_idle("with --show", {"--write": write, "--fail-under": fail_under is not None})
        return _show(find_db(work.project, work.db), show, as_json)
    if plan.method == "gepa":
        idle = {
            f"--{n}": getattr(plan, n) != getattr(Plan, n) for n in ("beam", "branch", "rounds")
        }
        refuse_idle("with --method gepa", idle)
    if not plan.reflect_with.startswith(("http://", "https://")):
        where = "without an address in --reflect-with"
        refuse_idle(where, {"--reflect-model": plan.reflect_model})
    plan = replace(plan, parts=plan.parts or ["system"])
    context = work.open()
    with data_stdout():
        gated = fail_under is not None
        report = asyncio.run(_optimize(context, work.model, plan, write, gated))
        _print(report, as_json)
    if fail_under is not None and (reached := report["test"]["best"]["value"]) < fail_under:
        raise GateNotMet(f"The best prompt solves {reached:.3f} of the test tasks.")


def _show(path: Path, run: str, as_json: bool) -> None:
    """Print the contents of a search's screen."""
    from agentrl_cli.plugins.prompts.candidates import load_candidates, plain_lines
    from agentrl_cli.store import Store

    with Store.open(path, readonly=True) as store:
        found = load_candidates(store, run)
    if as_json:
        echo_json(
            {
                "run": found.run.name,
                "best": found.best,
                "candidates": [asdict(row) for row, _ in found.rows],
            }
        )
    else:
        for line in plain_lines(found, min(shutil.get_terminal_size().columns, 120)):
            echo(line)


async def _optimize(
    context: Context, model: str | None, plan: Plan, write: bool, gated: bool
) -> dict[str, Any]:
    from agentrl_cli.plugins.prompts.optimize import optimize

    async with load_runtime(context, context.config, model) as runtime:
        return await optimize(runtime, plan, write=write, gated=gated, narrate=narrate)


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return echo_json({name: value for name, value in report.items() if name != "base_parts"})
    valid, test = report["validation"], report["test"]
    echo(f"run         {report['run']}: {report['candidates']} candidates, {report['episodes']} episodes,"
         f" {report['reflections']} reflections")  # fmt: skip
    echo(
        f"validation  {report['base']} {_number(valid['base'])} -> {report['best']} {_number(valid['best'])}"
    )
    if test is not None:
        base, best, gap = test["base"], test["best"], test["difference"]
        echo(
            f"test        {_interval(base)} -> {_interval(best)}  difference {gap['value']:+.3f}"
            f" [{gap['low']:+.3f}, {gap['high']:+.3f}], McNemar p {test['p_value']:.3g}, {test['tasks']} tasks"
            + (f", {test['ungraded']} others ungraded" if test["ungraded"] else "")
        )
    for name, text in report["parts"].items():
        old = report["base_parts"][name].splitlines()
        for line in difflib.unified_diff(
            old, text.splitlines(), f"{name} (base)", f"{name} (best)", lineterm=""
        ):
            echo(line)
    if report["base"] == report["best"]:
        narrate("No candidate was better than the pack's own text.")
    if report["written"]:
        narrate(f"written to {report['written']}; train from there: agentrl train")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(found: dict[str, float]) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
