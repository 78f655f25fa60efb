"""`agentrl eval`: pass@k with intervals, base against checkpoint on the same tasks, flipped tasks, a gate for CI."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.checkpoints import full_name, served, trained_by
from agentrl_cli.commands.common import (
    AgentOption,
    ConfigOption,
    Context,
    DbOption,
    JsonOption,
    LimitOption,
    PackOption,
    ProjectOption,
    RunOption,
    SeedOption,
    SetOption,
    announce_loading,
    data_stdout,
    echo,
    echo_json,
    narrate,
    open_project,
    warn,
    warn_unsafe,
)
from agentrl_cli.commands.progress import Progress
from agentrl_cli.commands.tables import aligned, interval, write_svg
from agentrl_cli.errors import ConfigError, GateNotMet, UsageError

if TYPE_CHECKING:
    from agentrl_cli.evaluate import Comparison, EvalResult, Score
    from agentrl_cli.store import Store
    from agentrl_cli.types import Task

NamedArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="checkpoint",
        help="best, last, base, a step, RUN@STEP, a folder; default: the newest run's best.",
        autocompletion=completion.checkpoints,
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", help="The same.", autocompletion=completion.checkpoints),
]
CompareOption = Annotated[
    str | None,
    typer.Option(
        "--compare-to",
        help="Likewise, or none; default: base.",
        autocompletion=completion.checkpoints,
    ),
]
SplitOption = Annotated[
    list[str] | None,
    typer.Option("--split", help="Default: eval.split, heldout. Repeatable; gates use the first."),
]
FamiliesOption = Annotated[
    str | None, typer.Option("--families", metavar="A,B", help="Only tasks of these families.")
]
KOption = Annotated[
    int | None,
    typer.Option("-k", "--samples", min=1, help="Attempts at each task: pass@1 to pass@k."),
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", "-T", min=0, help="0 is greedy.")
]
NoToolsOption = Annotated[bool, typer.Option("--no-tools", help="Evaluate without tools.")]
GateOption = Annotated[
    float | None,
    typer.Option(
        "--fail-under",
        min=0,
        max=1,
        help="Exit 4 if pass@1 of the checkpoint, or of any model, is lower.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="Reuse the same evaluation's earlier attempts even if it finished."
    ),
]

ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        help='"tiny", a Hugging Face id, a folder, or RUN@STEP. Repeatable: the models side by side.',
        autocompletion=completion.models,
    ),
]
EndpointOption = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        metavar="NAME@URL",
        help="A model of an OpenAI-compatible server, beside the others. Repeatable; its key: remote.api_key_env.",
    ),
]
SvgOption = Annotated[
    Path | None, typer.Option("--svg", help="Write pass@1 with its intervals as a picture.")
]

SHOWN = 20
"""Flipped tasks on the screen; --json has all."""


def command(
    named: NamedArgument = None,
    checkpoint: CheckpointOption = None,
    compare_to: CompareOption = None,
    run: RunOption = None,
    split: SplitOption = None,
    families: FamiliesOption = None,
    samples: KOption = None,
    limit: LimitOption = None,
    temperature: TemperatureOption = None,
    no_tools: NoToolsOption = False,
    fail_under: GateOption = None,
    resume: ResumeOption = False,
    seed: SeedOption = None,
    model: ModelsOption = None,
    endpoint: EndpointOption = None,
    svg: SvgOption = None,
    pack: PackOption = None,
    project: ProjectOption = None,
    db: DbOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    agent: AgentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate the newest run's best checkpoint against its base: pass@k with 95 % intervals, flipped tasks.

    Both get the same tasks and seeds. An interrupted evaluation resumes where it stopped. Exits with 4 if --fail-under
    is not met. Several models, or a model and an endpoint, are evaluated side by side instead, each pair with its test.

    JSON: {"settings": {…}, "results": [{"name", "splits": {"test": {"pass_at": {"1": {"value", "low", "high", "n"}},
    "families": {…}, …}}}], "comparisons": [{"p_value", "difference", "flips": […], …}], "gate": null}
    """
    models = list(dict.fromkeys(model or []))
    flags: dict[str, Any] = {
        "eval.k": samples,
        "eval.limit": limit,
        "eval.temperature": temperature,
        "seed": seed,
    }
    flags |= {"eval.fail_under": fail_under, "task.packs": pack or None, "task.agent": agent}
    flags["model.name"] = models[0] if models else None
    context = open_project(project, db, config, sets, flags)
    several = [*models, *(endpoint or [])] if endpoint or len(models) > 1 else []
    asked = Asked(named or checkpoint, compare_to, run, tuple(several))
    require_alone(asked, twice=named is not None and checkpoint is not None)
    names = [name for name in families.split(",") if name] if families else None
    with data_stdout():
        plan = make_plan(context, asked, split, names, not no_tools, resume, limit is not None)
        announce_loading()
        results = run_plan(context, plan)
        if svg is not None:
            write_svg(
                svg,
                [(s, [r.scores[s].pass_at[1] for r in results]) for s in results[0].splits],
                results,
            )
        report(plan, results, as_json=as_json, gate=context.config.eval.fail_under)


def run_plan(context: Context, plan: Plan) -> list[EvalResult]:
    """Return the results of a plan's candidates, in order."""
    try:
        return [asyncio.run(_evaluate(context, plan, candidate)) for candidate in plan.candidates]
    except KeyboardInterrupt:
        narrate("Stopped; finished attempts are kept. Run the same command again to resume.")
        raise


@dataclass(frozen=True, slots=True)
class Asked:
    """The models that the command names."""

    checkpoint: str | None = None
    compare_to: str | None = None
    run: str | None = None
    several: tuple[str | None, ...] = ()
    """Models and endpoints side by side, in place of the others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The models to evaluate, and on which tasks. Names are those of `load_policy`; None is the configured model."""

    candidates: tuple[str | None, ...]
    """The base first if there are two."""
    tasks: tuple[Task, ...]
    settings: Any
    resume: bool
    several: bool = False
    """The candidates are models side by side, none of them the base of another."""


def make_plan(
    context: Context,
    asked: Asked,
    split: Sequence[str] | None,
    families: Sequence[str] | None,
    with_tools: bool,
    resume: bool,
    limited: bool,
) -> Plan:
    """What is evaluated. `limited`: --limit was given and overrides task.limit; otherwise the smaller limit applies."""
    from agentrl_cli.evaluate import HELDOUT, Settings, pick_tasks
    from agentrl_cli.store import Store
    from agentrl_cli.tasks import load_packs

    settings = Settings.of(context.config, with_tools=with_tools)
    packs = load_packs(
        context.config.task.packs, base=context.project, agent=context.config.task.agent
    )
    splits = list(split or [context.config.eval.split])
    if not split and any(
        (pack.dir / "data" / f"{HELDOUT}.jsonl").is_file() for pack in packs.values()
    ):
        splits = list(dict.fromkeys([*splits, HELDOUT]))
    families = families or context.config.task.families
    limits = [context.config.eval.limit, None if limited else context.config.task.limit]
    limit = min((number for number in limits if number is not None), default=None)
    tasks = pick_tasks(packs, splits, families=families, limit=limit)
    if not tasks:
        raise ConfigError(f"No tasks to evaluate in {', '.join(splits)}.")
    context.db.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(context.db) as store:
        candidates = asked.several or _trained(context, store, asked)
        _find(context, store, candidates)
    return Plan(candidates, tuple(tasks), settings, resume, bool(asked.several))


def require_alone(asked: Asked, *, twice: bool = False) -> None:
    """Raise UsageError for an option that names a model beside several, or beside the argument (`twice`)."""
    if twice:
        raise UsageError("A checkpoint is named twice.", hint=f"agentrl eval {asked.checkpoint}")
    for flag, value, hint in (
        ("--checkpoint", asked.checkpoint, "Write --model RUN@STEP."),
        ("--run", asked.run, "Write --model RUN@best."),
        (
            "--compare-to",
            asked.compare_to,
            "Name it with --model: every pair of models is compared.",
        ),
    ):
        if asked.several and value is not None:
            raise UsageError(f"{flag} and several models exclude each other.", hint=hint)


def _trained(context: Context, store: Store, asked: Asked) -> tuple[str | None, ...]:
    """Return the base and a checkpoint, or one of them alone."""
    chosen = full_name(store, asked.checkpoint, asked.run)
    origin = trained_by(store, chosen)
    within = asked.run or (origin[0].name if origin else None)
    if chosen is None and asked.checkpoint is None:
        narrate("Nothing was trained here yet: evaluating the base alone. `agentrl train` trains.")
    other = None
    compare_to = asked.compare_to or "base"
    if compare_to != "none" and not (chosen is None and compare_to == "base"):
        # By default, a run's checkpoint is compared with the model that the run started from.
        other = full_name(store, compare_to, within) if within or compare_to != "base" else None
        same = other == chosen or (other is None and chosen == context.config.model.name)
        return (chosen,) if same else (other, chosen)
    return (chosen,)


def _find(context: Context, store: Store, candidates: Sequence[str | None]) -> None:
    """Raise for a missing model before the other one is evaluated."""
    from agentrl_cli.models.load import model_folder

    for candidate in candidates:
        name, config = served(context.config, candidate)
        if config is not context.config:
            if not config.remote.model:
                raise UsageError(
                    f"--endpoint {candidate} names no model.", hint="Write --endpoint NAME@URL."
                )
            continue
        if (name or context.config.model.name) != "scripted":
            model_folder(
                name or context.config.model.name, context.config, base=context.project, store=store
            )


async def _evaluate(context: Context, plan: Plan, candidate: str | None) -> EvalResult:
    """Evaluates one policy on the plan's tasks, with progress on stderr."""
    from agentrl_cli.evaluate import evaluate
    from agentrl_cli.runtime import open_runtime

    name = candidate or context.config.model.name
    spec, config = served(context.config, candidate)
    async with open_runtime(config, base=context.project, db=context.db, spec=spec) as runtime:
        warn_unsafe(runtime.sandbox)
        origin = trained_by(runtime.store, spec)
        with Progress(name, len(plan.tasks) * plan.settings.k) as progress:
            result = await evaluate(
                runtime.loaded,
                runtime.rollout(),
                tasks=plan.tasks,
                settings=plan.settings,
                parent=(origin[0].id, origin[1]) if origin else None,
                resume=plan.resume,
                on_done=lambda attempt: progress.advance(),
            )
    kept = f", {result.reused} of them reused" if result.reused else ""
    narrate(f"{name}: {len(result.attempts)} attempts{kept}, {result.seconds:.0f} s")
    for split, numbers in result.scores.items():
        if numbers.errors:
            counts = ", ".join(f"{outcome} {count}" for outcome, count in numbers.errors.items())
            warn(
                f"{name}, {split}: attempts that failed twice and are excluded from all numbers: {counts}"
            )
    return result


def report(plan: Plan, results: Sequence[EvalResult], *, as_json: bool, gate: float | None) -> None:
    """Print results (the base first) and their comparison; raise GateNotMet if a pass@1 is too low.

    The gate is for the last of base and checkpoint, and for each of several models.
    """
    from agentrl_cli.evaluate import compare

    last = results[-1]
    both = [compare(*pair, split) for split in last.splits for pair in combinations(results, 2)]
    gated = results if plan.several else [last]
    low = [
        one for one in gated if gate is not None and (one.pass_rate is None or one.pass_rate < gate)
    ]
    if as_json:
        settings = {
            name: getattr(plan.settings, name)
            for name in ("k", "temperature", "seed", "with_tools")
        }
        echo_json(
            {
                "settings": {**settings, "tasks": len(plan.tasks), "splits": list(last.splits)},
                "results": [result.report() for result in results],
                "comparisons": [comparison.report() for comparison in both],
                "gate": None if gate is None else {"fail_under": gate, "met": not low},
            }
        )
    else:
        for split in last.splits:
            _print_split(results, split)
            for comparison in both:
                if comparison.split == split:
                    _print_comparison(comparison, alone=len(results) == 2)
    if low:
        rates = ", ".join(
            f"{one.name} {'unknown' if one.pass_rate is None else f'{one.pass_rate:.3f}'}"
            for one in low
        )
        raise GateNotMet(f"pass@1 on {last.splits[0]} is under {gate:g}: {rates}.")


def _print_split(results: Sequence[EvalResult], split: str) -> None:
    scores = [result.scores[split] for result in results]
    last = results[-1]
    title = "held-out families, never trained on" if split == "heldout" else f"split {split}"
    tools = "" if last.with_tools else ", without tools"
    echo(
        f"{title}: {scores[-1].n_tasks} tasks, {last.k} attempts each, temperature {last.temperature:g}{tools}"
    )
    rows = [
        [f"pass@{at}", *(interval(one.pass_at[at]) for one in scores)]
        for at in range(1, last.k + 1)
    ]
    rows += [[name, *(_plain(one, key) for one in scores)] for name, key in _MEANS]
    if any(one.errors for one in scores):
        rows.append(["errors, excluded", *(str(sum(one.errors.values())) for one in scores)])
    heads = [result.name for result in results]
    for line in aligned(["", *heads], rows):
        echo(line, painted=True)
    echo()
    families = [{**result.packs(split), **result.families(split)} for result in results]
    rows = [
        [
            name,
            str(one.n_tasks),
            *(interval(group[name].pass_at[1]) if name in group else "-" for group in families),
        ]
        for name, one in sorted(families[-1].items())
    ]
    for line in aligned(["family", "tasks", *(f"{head} pass@1" for head in heads)], rows):
        echo(line, painted=True)
    echo()


def _print_comparison(comparison: Comparison, *, alone: bool) -> None:
    """The test of a pair; with its flipped tasks if it is the only one."""
    one = comparison.difference
    pair = "" if alone else f"{comparison.before} to {comparison.after}: "
    echo(
        f"{pair}difference in pass@1 {one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}] on {comparison.n_tasks} tasks;"
        f" {comparison.gained} tasks gained, {comparison.lost} lost,"
        f" McNemar's exact test p = {comparison.p_value:.3g}"
    )
    if not alone:
        return
    rows = [
        [
            "gained" if flip.gained else "lost",
            flip.task_id,
            flip.family,
            f"{flip.before[0]}/{flip.before[1]}",
            f"{flip.after[0]}/{flip.after[1]}",
            flip.before_episode,
            flip.after_episode,
        ]
        for flip in comparison.flips
    ]
    if rows:
        before, after = comparison.before, comparison.after
        # Losses are rarer and matter more, so both are shown.
        lost = rows[comparison.gained :][: SHOWN // 2]
        shown = rows[: comparison.gained][: SHOWN - len(lost)] + lost
        echo()
        heads = ["flip", "task", "family", before, after, f"replay {before}", f"replay {after}"]
        for line in aligned(heads, shown):
            echo(line, painted=True)
        if len(shown) < len(rows):
            narrate(f"{len(shown)} of {len(rows)} flipped tasks; --json prints all.")
        narrate(f"Look at one: agentrl replay {rows[0][-1]}")
    echo()


_MEANS = (
    ("mean reward", "reward"),
    ("tool-call rate", "tool_call_rate"),
    ("tool-error rate", "tool_error_rate"),
    ("tokens sampled", "tokens"),
)


def _plain(numbers: Score, key: str) -> str:
    value: float = getattr(numbers, key)
    return (
        "-" if value != value else f"{value:.3f}" if key != "tokens" else f"{value:.1f}"
    )  # NaN is not itself
