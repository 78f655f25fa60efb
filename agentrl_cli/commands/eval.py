"""`agentrl eval`: pass@k with intervals, base against checkpoint on the same tasks, flipped tasks, a gate for CI."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    AgentOption,
    Context,
    JsonOption,
    LimitOption,
    RunOption,
    data_stdout,
    echo,
    echo_json,
    narrate,
    warn,
)
from agentrl_cli.commands.options import (
    NoToolsOption,
    TemperatureOption,
    WorkOptions,
    refuse_idle,
)
from agentrl_cli.commands.progress import Progress, load_runtime
from agentrl_cli.commands.tables import interval, print_rows, write_svg
from agentrl_cli.errors import GateNotMet, NotFound, UsageError, pluralise

if TYPE_CHECKING:
    from agentrl_cli.evaluate import Comparison, EvalResult
    from agentrl_cli.evaluate.plan import Plan

SHOWN = 20
"""Flipped tasks on the screen; --json has all."""
BenchOption = Annotated[
    str | None,
    typer.Option(
        "--bench", help="A set of packs in place of the project's: math, math-hub, tools."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateOptions:
    """The models to evaluate."""

    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="checkpoint",
            help="best, last, base, a step, RUN@STEP, a folder; default: the newest run's best.",
            autocompletion=completion.checkpoints,
        ),
    ] = None
    compare_to: Annotated[
        str | None,
        typer.Option(
            "--compare-to",
            help="Likewise, or none; default: base.",
            autocompletion=completion.checkpoints,
        ),
    ] = None
    run: RunOption = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help='"tiny", a Hugging Face id, a folder, or RUN@STEP. Repeatable: the models side by side.',
            autocompletion=completion.models,
        ),
    ] = None
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--endpoint",
            metavar="NAME@URL",
            help="A model of an OpenAI-compatible server, beside the others. Repeatable; its key: remote.api_key_env.",
        ),
    ] = None

    @property
    def several(self) -> tuple[str | None, ...]:
        """Models and endpoints, each once."""
        return tuple(dict.fromkeys([*(self.model or []), *(self.endpoint or [])]))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOptions:
    """The attempts that each model makes."""

    split: Annotated[
        list[str] | None,
        typer.Option(
            "--split", help="Default: eval.split, heldout. Repeatable; gates use the first."
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            "-k", "--samples", min=1, max=2**16, help="Attempts at each task: pass@1 to pass@k."
        ),
    ] = None
    limit: LimitOption = None
    temperature: TemperatureOption = None
    no_tools: NoToolsOption = False
    fail_under: Annotated[
        float | None,
        typer.Option(
            "--fail-under",
            min=0,
            max=1,
            help="Exit 4 if pass@1 of the checkpoint, or of any model, is lower.",
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Reuse the same evaluation's earlier attempts even if it finished."
        ),
    ] = False


def command(
    bench: BenchOption = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Write pass@1 with its intervals as a picture.")
    ] = None,
    agent: AgentOption = None,
    as_json: JsonOption = False,
    *,
    models: CandidateOptions,
    attempts: AttemptOptions,
    work: WorkOptions,
) -> None:
    """Evaluate the newest run's best checkpoint against its base: pass@k with 95 % intervals, flipped tasks.

    Both get the same tasks and seeds. An interrupted evaluation resumes where it stopped. Exits with 4 if --fail-under
    is not met. Models that are named are evaluated side by side instead, one beside a checkpoint in place of its base.
    --bench evaluates models on a named set of packs, without a project.

    JSON: {"settings": {…}, "results": [{"name", "splits": {"test": {"pass_at": {"1": {"value", "low", "high", "n"}},
    "families": {…}, …}}}], "comparisons": [{"p_value", "difference", "flips": […], …}], "gate": null}

    JSON of --bench: {"bench", "results": [{"pack", "split", "models": {NAME: {"value", "low", "high", "n"}}}],
    "comparisons": [{"pack", "split", "p_value", …}]}
    """
    flags: dict[str, Any] = {
        "eval.k": attempts.samples,
        "eval.limit": attempts.limit,
        "eval.temperature": attempts.temperature,
        "eval.fail_under": attempts.fail_under,
        "task.agent": agent,
        "model.name": models.model[0] if models.model else None,
    }
    if svg is not None and not svg.absolute().parent.is_dir():
        raise UsageError(f"The folder of {svg} does not exist.")
    with data_stdout():
        if bench is not None:
            return _run_bench(bench, flags, models, attempts, work, svg, as_json)
        context = work.open(flags)
        beside = bool(models.checkpoint or models.run)
        if len(models.several) == 1 and beside != bool(models.compare_to):
            place = {"compare_to" if beside else "checkpoint": models.several[0]}
            models = replace(models, model=None, endpoint=None, **place)
        splits = attempts.split or ()
        plan, results = _evaluate_all(context, models, attempts, splits, models.several)
        if svg is not None:
            shares = [(s, [r.scores[s].pass_at[1] for r in results]) for s in results[0].splits]
            write_svg(svg, shares, results)
        _report(plan, results, as_json=as_json, gate=context.config.eval.fail_under)


def _evaluate_all(
    context: Context,
    models: CandidateOptions,
    attempts: AttemptOptions,
    splits: Sequence[str],
    several: tuple[str | None, ...],
) -> tuple[Plan, list[EvalResult]]:
    """Evaluate each candidate in turn; everything that can be wrong with one is found before."""
    from agentrl_cli.evaluate.plan import Request, make_plan

    plan = make_plan(
        context.config,
        context.project,
        context.db,
        Request(models.checkpoint, models.compare_to, models.run, several),
        splits,
        with_tools=not attempts.no_tools,
        resume=attempts.resume,
        whole_split=attempts.limit is not None,
        narrate=narrate,
    )
    try:
        results = [asyncio.run(_evaluate(context, plan, one)) for one in plan.candidates]
    except KeyboardInterrupt:
        narrate("Stopped; finished attempts are kept. Run the same command again to resume.")
        raise typer.Exit(130) from None
    if len({result.name for result in results}) < len(results):  # one model at two addresses
        pairs = zip(results, plan.candidates, strict=True)
        results = [replace(result, name=full or result.name) for result, full in pairs]
    return plan, results


async def _evaluate(context: Context, plan: Plan, candidate: str | None) -> EvalResult:
    """Evaluate one policy on the plan's tasks, with progress on stderr."""
    from agentrl_cli.evaluate import evaluate
    from agentrl_cli.evaluate.plan import endpoint_config
    from agentrl_cli.store.checkpoint_names import trained_by

    name = candidate or context.config.model.name
    spec, config = endpoint_config(context.config, candidate)
    async with load_runtime(context, config, spec) as runtime:
        origin = trained_by(runtime.store, spec)
        count = len(plan.tasks) * plan.settings.k
        narrate(f"{name}: {pluralise(count, 'attempt')} at {pluralise(len(plan.tasks), 'task')} …")
        with Progress(name, count) as progress:
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


def _report(
    plan: Plan, results: Sequence[EvalResult], *, as_json: bool, gate: float | None
) -> None:
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
        settings = asdict(plan.settings)
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


_MEANS = {"mean reward": "reward", "tool-call rate": "tool_call_rate",
          "tool-error rate": "tool_error_rate", "tokens sampled": "tokens"}  # fmt: skip


def _print_split(results: Sequence[EvalResult], split: str) -> None:
    scores = [result.scores[split] for result in results]
    last = results[-1]
    title = "held-out families, never trained on" if split == "heldout" else f"split {split}"
    tools = "" if last.with_tools else ", without tools"
    tried = f"{pluralise(scores[-1].n_tasks, 'task')}, {pluralise(last.k, 'attempt')} each"
    echo(f"{title}: {tried}, temperature {last.temperature:g}{tools}")
    rows = [
        [f"pass@{k}", *(interval(one.pass_at[k]) for one in scores)] for k in range(1, last.k + 1)
    ]
    rows += [
        [name, *(f"{getattr(one, key):.3f}".replace("nan", "-") for one in scores)]
        for name, key in _MEANS.items()
    ]
    if any(one.errors for one in scores):
        rows.append(["errors, excluded", *(str(sum(one.errors.values())) for one in scores)])
    heads = [result.name for result in results]
    print_rows(["", *heads], rows)
    echo()
    families = [{**result.packs(split), **result.families(split)} for result in results]
    rows = [
        [
            name,
            str(one.n_tasks),
            *(interval(f[name].pass_at[1]) if name in f else "-" for f in families),
        ]
        for name, one in sorted(families[-1].items())
    ]
    print_rows(["family", "tasks", *(f"{head} pass@1" for head in heads)], rows)
    echo()


def _print_comparison(found: Comparison, *, alone: bool, pack: str = "") -> None:
    """Print the test of a pair; with its flipped tasks if it is the only one."""
    one = found.difference
    pair = "" if alone else f"{pack}{found.before} to {found.after}: "
    echo(
        f"{pair}difference in pass@1 {one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}] on {one.n} tasks;"
        f" {found.gained} tasks gained, {found.lost} lost, McNemar's exact test p = {found.p_value:.3g}"
    )
    if not alone:
        return
    rows = [
        [flip.flip, flip.task_id, flip.family, "/".join(map(str, flip.before)),
         "/".join(map(str, flip.after)), flip.episode_before, flip.episode_after]
        for flip in found.flips
    ]  # fmt: skip
    if rows:
        # Losses are rarer and matter more, so both are shown.
        lost = rows[found.gained :][: SHOWN // 2]
        shown = rows[: found.gained][: SHOWN - len(lost)] + lost
        pair_of = [found.before, found.after]
        echo()
        print_rows(["flip", "task", "family", *pair_of, *(f"replay {n}" for n in pair_of)], shown)
        if len(shown) < len(rows):
            narrate(f"{len(shown)} of {len(rows)} flipped tasks; --json prints all.")
        narrate(f"Look at one: agentrl replay {rows[0][-1]}")
    echo()


def _run_bench(
    name: str,
    flags: dict[str, Any],
    models: CandidateOptions,
    attempts: AttemptOptions,
    work: WorkOptions,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Evaluate the models on each pack of a set, and print one table: pass@1, and a test of each pair."""
    from agentrl_cli.evaluate import compare
    from agentrl_cli.evaluate.plan import BENCHES

    if name not in BENCHES:
        raise NotFound.of("bench", name, BENCHES)
    named = {"CHECKPOINT": models.checkpoint, "--compare-to": models.compare_to}
    refuse_idle("with --bench; --model names models", {**named, "--run": models.run})
    gate = {"--fail-under": attempts.fail_under is not None}
    refuse_idle("with --bench", {"--pack": work.pack, "--split": attempts.split, **gate})
    rows: list[tuple[str, str, list[Any]]] = []
    tests: list[tuple[str, Comparison]] = []
    results: list[EvalResult] = []
    for pack, splits in BENCHES[name].items():
        context = work.open({**flags, "task.packs": [pack]}, required=False)
        narrate(f"{pack}: {', '.join(splits)}")
        _, results = _evaluate_all(context, models, attempts, splits, models.several or (None,))
        for split in results[0].splits:
            rows.append((pack, split, [result.scores[split].pass_at[1] for result in results]))
            tests += [(pack, compare(*pair, split)) for pair in combinations(results, 2)]
    if svg is not None:
        write_svg(svg, [(f"{pack} {split}", found) for pack, split, found in rows], results)
    names = [result.name for result in results]
    if as_json:
        found = [
            {
                "pack": pack,
                "split": split,
                "models": dict(zip(names, map(asdict, values), strict=True)),
            }
            for pack, split, values in rows
        ]
        reports = [{"pack": pack, **pair.report()} for pack, pair in tests]
        return echo_json({"bench": name, "results": found, "comparisons": reports})
    lines = [
        [pack, split, "/".join(dict.fromkeys(str(one.n) for one in found)), *map(interval, found)]
        for pack, split, found in rows
    ]
    print_rows(["pack", "split", "n", *names], lines)
    for pack, pair in tests:
        _print_comparison(pair, alone=False, pack=f"{pack} {pair.split}: ")
