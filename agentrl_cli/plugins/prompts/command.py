"""`agentrl optimize`: better prompts instead of better weights."""

from __future__ import annotations

import asyncio
import difflib
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    Context,
    DbOption,
    JsonOption,
    ModelOption,
    PackOption,
    ProjectOption,
    SeedOption,
    SetOption,
    announce_loading,
    data_stdout,
    echo,
    echo_json,
    narrate,
    open_project,
    warn_unsafe,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import ConfigError, GateNotMet, UsageError

if TYPE_CHECKING:
    from agentrl_cli.plugins.prompts.search import Parts, Search
    from agentrl_cli.runtime import Runtime
    from agentrl_cli.store import RunRow
    from agentrl_cli.types import Task

WRITTEN = Path("prompts") / "best.yaml"
"""Where --write puts the texts, in the project."""
ShowOption = Annotated[
    str | None,
    typer.Option(
        "--show",
        help="Print the candidates of this search and leave.",
        autocompletion=completion.runs,
    ),
]
SETTINGS = "optimize"
"""Kind of the event with the settings of a search: the same ones continue it."""


@dataclass(frozen=True)
class Plan:
    """The settings of a search."""

    method: str
    budget: int
    reflect_with: str
    reflect_model: str
    parts: list[str]
    train: int
    validation: int
    test: int
    minibatch: int
    beam: int
    branch: int
    rounds: int
    temperature: float


def command(
    method: Annotated[Literal["gepa", "apo"], typer.Option(help="The search.")] = "gepa",
    budget: Annotated[int, typer.Option(min=1, help="Episodes that the search may make.")] = 400,
    reflect_with: Annotated[
        str,
        typer.Option(help="What writes the prompts: served, http://host/v1, or file.py:function."),
    ] = "served",
    reflect_model: Annotated[str, typer.Option(help="The model's name at that address.")] = "",
    part: Annotated[
        list[str] | None,
        typer.Option(help="system or tools.NAME.description; repeatable. Default: system."),
    ] = None,
    train: Annotated[
        int, typer.Option("--train-tasks", min=1, help="Training tasks to learn from.")
    ] = 32,
    validation: Annotated[
        int, typer.Option("--validation-tasks", min=1, help="Tasks that choose the best.")
    ] = 16,
    test: Annotated[
        int, typer.Option("--test-tasks", min=0, help="Tasks of the final comparison; 0: none.")
    ] = 64,
    minibatch: Annotated[int, typer.Option(min=1, help="Attempts that one reflection sees.")] = 4,
    beam: Annotated[int, typer.Option(min=1, help="apo: prompts that stay after a round.")] = 2,
    branch: Annotated[int, typer.Option(min=1, help="apo: new prompts of each in a round.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="apo: rounds.")] = 3,
    temperature: Annotated[
        float, typer.Option("--temperature", "-T", min=0, help="0 is greedy.")
    ] = 0.0,
    write: Annotated[
        bool, typer.Option("--write", help="Put the best texts into the project.")
    ] = False,
    show: ShowOption = None,
    fail_under: Annotated[
        float | None, typer.Option(help="Exit 4 if the best solves less of the test tasks.")
    ] = None,
    model: ModelOption = None,
    seed: SeedOption = None,
    pack: PackOption = None,
    project: ProjectOption = None,
    db: DbOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search for better texts of a pack by reflection on its episodes; a search that was killed is continued.

    Every evaluation is an episode of the run, tagged `prompt:ID`. Base and best are compared on the test split.

    JSON: {"run", "base", "best", "parts", "validation", "test": {"base", "best", "difference", "p_value"}, "episodes",
    "reflections", "written"}; with --show {"run", "best", "candidates": [{"id", "parent_id", "scores", "parts", …}]}
    """
    if show is not None:
        return _show(find_db(project, db), show, as_json)
    if fail_under is not None and not test:
        raise UsageError("--fail-under needs test tasks.", hint="Leave out --test-tasks 0.")
    texts = (reflect_with, reflect_model, part or ["system"])
    plan = Plan(
        method,
        budget,
        *texts,
        train,
        validation,
        test,
        minibatch,
        beam,
        branch,
        rounds,
        temperature,
    )
    context = open_project(project, db, None, sets, {"seed": seed, "task.packs": pack or None})
    with data_stdout():
        announce_loading()
        report = asyncio.run(_optimize(context, model, plan, write))
        _print(report, as_json)
    reached = ((report["test"] or {}).get("best") or {"value": 0.0})["value"]
    if fail_under is not None and reached < fail_under:
        raise GateNotMet(f"The best prompt solves {reached:.3f} of the test tasks.")


def _show(path: Path, run: str, as_json: bool) -> None:
    """Print what the screen of a search shows."""
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


async def _optimize(context: Context, model: str | None, plan: Plan, write: bool) -> dict[str, Any]:
    from agentrl_cli.runtime import open_runtime

    async with open_runtime(
        context.config, base=context.project, db=context.db, spec=model
    ) as runtime:
        warn_unsafe(runtime.sandbox)
        return await _search(runtime, plan, write)


async def _search(runtime: Runtime, plan: Plan, write: bool) -> dict[str, Any]:
    from agentrl_cli.agents.runners import AgentRollout
    from agentrl_cli.plugins.prompts.reflection import reflection
    from agentrl_cli.plugins.prompts.search import Search
    from agentrl_cli.registry import require_package

    if len(runtime.packs) != 1:
        raise ConfigError(
            "The texts of one pack are optimised at a time.", hint="Name one with --pack."
        )
    (pack,) = runtime.packs.values()
    first = _first(runtime, plan)
    tasks = _tasks(runtime, plan)
    if plan.budget < len(tasks["validation"]):
        raise UsageError(
            f"A budget of {plan.budget} episodes is below one evaluation ({len(tasks['validation'])} tasks).",
            hint="Raise --budget, or lower --validation-tasks.",
        )
    if plan.method == "gepa":
        require_package("gepa", "0.1", "prompts", otherwise="use --method apo")
    seed = runtime.config.seed
    reflect = reflection(plan.reflect_with, plan.reflect_model, runtime.loaded, seed, runtime.base)
    run = _run(runtime, plan)
    rollout = AgentRollout(
        runtime.loaded.policy,
        runtime.loaded.chat,
        runtime.packs,
        runtime.config,
        sandbox=runtime.sandbox,
        store=runtime.store,
        hooks=runtime.hooks,
        temperature=plan.temperature,
        run=run,
    )
    narrate(
        f"{run.name}: {plan.method}, at most {plan.budget} episodes and {2 * len(tasks['test'])} for the test;"
        f" {plan.reflect_with} writes the prompts"
    )
    given = Search(
        runtime.store, run, pack, rollout, reflect, seed, plan.budget, plan.method, narrate
    )
    status, error = "stopped", "interrupted"
    with runtime.store.claims.hold(run.id, "optimize"):
        try:
            best = await _method(given, first, tasks, plan)
            result = await _report(given, first, best, tasks["test"])
            result["written"] = _write(runtime, best) if write else None
            status, error = "finished", ""
        except Exception as problem:
            status, error = "failed", str(problem)
            raise
        finally:
            runtime.store.runs.update(run.id, status=status, error=error, ended=time.time())
    return result


async def _method(given: Search, first: Parts, tasks: dict[str, list[Task]], plan: Plan) -> Parts:
    from agentrl_cli.plugins.prompts import apo, with_gepa

    if plan.method == "gepa":
        return await with_gepa.search(
            given, first, tasks["train"], tasks["validation"], plan.minibatch
        )
    size = apo.Beam(plan.beam, plan.branch, plan.rounds, plan.minibatch, plan.validation)
    return await apo.search(given, first, tasks["train"], tasks["validation"], size)


def _first(runtime: Runtime, plan: Plan) -> Parts:
    """Return the pack's own texts. Raises NotFound for an unknown part, ConfigError for an empty one."""
    from agentrl_cli.errors import NotFound
    from agentrl_cli.tasks.texts import parts_of

    (pack,) = runtime.packs.values()
    known = parts_of(pack)
    for name in plan.parts:
        if name not in known:
            raise NotFound.of(f"text of the pack {pack.name}", name, list(known))
        if not known[name].strip():
            raise ConfigError(
                f"The pack {pack.name} has no text {name} to start from.",
                hint="Write one in task.yaml.",
            )
    return {name: known[name] for name in plan.parts}


def _tasks(runtime: Runtime, plan: Plan) -> dict[str, list[Task]]:
    """Train, validation and test tasks; without a validation split, it is taken from the end of the training tasks."""
    from agentrl_cli.evaluate import spread

    (pack,) = runtime.packs.values()
    settings = runtime.config
    train = pack.tasks(settings.task.split_train, families=settings.task.families)
    splits = pack.splits()
    name = settings.train.eval_split
    if name in splits and name != settings.task.split_train:
        validation = spread(pack.tasks(name), plan.validation)
    else:
        validation = train[-min(plan.validation, max(len(train) // 2, 1)) :]
        train = train[: len(train) - len(validation)] or train
    test = (
        spread(pack.tasks(settings.eval.split), plan.test)
        if plan.test and settings.eval.split in splits
        else []
    )
    found = {"train": spread(train, plan.train), "validation": validation, "test": test}
    for some in found.values():
        runtime.store.tasks.add(some)
    return found


def _run(runtime: Runtime, plan: Plan) -> RunRow:
    """Return the newest search with these settings that did not finish, or a new one."""
    from agentrl_cli.store.new_run import new_run

    store, wanted = (
        runtime.store,
        {**asdict(plan), "seed": runtime.config.seed, "model": runtime.loaded.name},
    )
    for old in store.runs.all():
        if old.kind == "optimize" and old.status != "finished" and not old.alive:
            events = [
                event["data"] for event in store.journal.events(old.id) if event["kind"] == SETTINGS
            ]
            if wanted in events:
                store.episodes.cancel(old.id)
                store.runs.update(old.id, status="running", error="", ended=0.0)
                narrate(f"{old.name} is continued: what it has is not made again")
                return old
    run = new_run(
        runtime.config,
        store,
        kind="optimize",
        packs=list(runtime.packs),
        tokenizer=runtime.loaded.hash,
        model=runtime.loaded.name,
    )
    store.journal.add_event(run.id, SETTINGS, wanted)
    return run


async def _report(given: Search, first: Parts, best: Parts, test: list[Task]) -> dict[str, Any]:
    """Base against best on the test tasks."""
    from agentrl_cli.evaluate.stats import difference, estimate, mcnemar
    from agentrl_cli.plugins.prompts.search import id_of
    from agentrl_cli.plugins.prompts.store import Prompts
    from agentrl_cli.types import Outcome

    rows = {row.id: row for row in Prompts(given.store).all(given.run.id)}
    result: dict[str, Any] = {
        "run": given.run.name,
        "base": id_of(first),
        "best": id_of(best),
        "candidates": len(rows),
        "validation": {
            name: rows[id_of(p)].scores.get("validation")
            for name, p in (("base", first), ("best", best))
        },
        "test": None,
        "base_parts": first,
        "parts": best,
        "episodes": given.spent,
        "reflections": given.asked,
    }
    if test:
        solved = {}
        for name, parts in (("base", first), ("best", best)):
            episodes = await given.evaluate(parts, test, free=True)
            given.keep_score(parts, "test", episodes)
            solved[name] = [float(each.outcome is Outcome.SOLVED) for each in episodes]
        pairs = list(zip(solved["base"], solved["best"], strict=True))
        result["test"] = {
            "tasks": len(test),
            "base": asdict(estimate(solved["base"])),
            "best": asdict(estimate(solved["best"])),
            "difference": asdict(difference(solved["base"], solved["best"])),
            "p_value": mcnemar(sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)),
        }
    return result


def _write(runtime: Runtime, best: Parts) -> str:
    """Put the texts into the project's folder and name them in agentrl.yaml."""
    from agentrl_cli.paths import PROJECT_FILE
    from agentrl_cli.tasks.texts import read_parts, write_parts

    named = runtime.config.task.prompts
    path = runtime.base / (named or WRITTEN)
    write_parts(path, {**(read_parts(path) if named else {}), **best})
    settings = runtime.base / PROJECT_FILE
    if named is None and settings.is_file():
        text = settings.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        at = next((n for n, line in enumerate(lines) if line.rstrip() == "task:"), None)
        if at is None:
            narrate(f"Add to {settings}:  task: {{prompts: {WRITTEN}}}")
        else:
            indent = next(
                (
                    line[: len(line) - len(line.lstrip())]
                    for line in lines[at + 1 :]
                    if line.strip()
                ),
                "  ",
            )
            lines.insert(at + 1, f"{indent or '  '}prompts: {WRITTEN}\n")
            settings.write_text("".join(lines), encoding="utf-8")
    return str(path)


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
