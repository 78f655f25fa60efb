"""`agentrl bench`: a named set of packs for one or several models, in one table and one picture. Nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    DbOption,
    JsonOption,
    LimitOption,
    ProjectOption,
    SeedOption,
    SetOption,
    data_stdout,
    echo,
    echo_json,
    narrate,
    open_project,
)
from agentrl_cli.commands.eval import (
    Asked,
    EndpointOption,
    KOption,
    ModelsOption,
    ResumeOption,
    SvgOption,
    TemperatureOption,
    make_plan,
    run_plan,
)
from agentrl_cli.commands.tables import aligned, interval, write_svg
from agentrl_cli.errors import NotFound

if TYPE_CHECKING:
    from agentrl_cli.evaluate import EvalResult

BENCHES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "math": {"math-task": ("test", "heldout", "test-4shot", "test-calculator", "test-python")},
    "math-hub": {
        "math-task": ("gsm8k", "gsm8k-8shot", "gsm8k-calculator", "math500", "math500-python")
    },
    "tools": {
        name: ("test", "heldout")
        for name in ("calc-task", "code-task", "file-task", "parallel-task", "sql-task")
    },
}
"""Name → the splits of each pack."""

NameArgument = Annotated[str, typer.Argument(help=f"The set: {', '.join(BENCHES)}.")]


def command(
    name: NameArgument,
    model: ModelsOption = None,
    endpoint: EndpointOption = None,
    svg: SvgOption = None,
    samples: KOption = None,
    limit: LimitOption = None,
    temperature: TemperatureOption = None,
    resume: ResumeOption = False,
    seed: SeedOption = None,
    project: ProjectOption = None,
    db: DbOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate models on a named set of packs: pass@1 with 95 % intervals, and an exact test of each pair.

    It is a set of evaluations as `agentrl eval` makes them: interrupted, the same command resumes. Nothing is trained.

    JSON: {"bench": "math", "results": [{"pack", "split", "models": {NAME: {"value", "low", "high", "n"}}}],
    "comparisons": [{"pack", "split", "p_value", …}]}
    """
    from agentrl_cli.evaluate import compare

    if name not in BENCHES:
        raise NotFound.of("bench", name, BENCHES)
    several = tuple(dict.fromkeys([*(model or []), *(endpoint or [])]))
    flags: dict[str, Any] = {
        "eval.k": samples,
        "eval.limit": limit,
        "eval.temperature": temperature,
        "seed": seed,
    }
    flags["model.name"] = model[0] if model else None
    rows: list[tuple[str, str, list[Any]]] = []
    tests: list[dict[str, Any]] = []
    results: list[EvalResult] = []
    with data_stdout():
        for pack, splits in BENCHES[name].items():
            context = open_project(
                project, db, config, sets, {**flags, "task.packs": [pack]}, required=False
            )
            narrate(f"{pack}: {', '.join(splits)}")
            plan = make_plan(
                context,
                Asked(several=several or (None,)),
                splits,
                None,
                True,
                resume,
                limit is not None,
            )
            results = run_plan(context, plan)
            for split in results[0].splits:
                rows.append((pack, split, [result.scores[split].pass_at[1] for result in results]))
                pairs = (compare(*pair, split) for pair in combinations(results, 2))
                tests += [{"pack": pack, **pair.report()} for pair in pairs]
        if svg is not None:
            write_svg(svg, [(f"{pack} {split}", found) for pack, split, found in rows], results)
        _show(name, rows, tests, [result.name for result in results], as_json=as_json)


def _show(
    bench: str,
    rows: list[tuple[str, str, list[Any]]],
    tests: list[dict[str, Any]],
    names: list[str],
    *,
    as_json: bool,
) -> None:
    if as_json:
        results = [
            {
                "pack": pack,
                "split": split,
                "models": {n: _values(one) for n, one in zip(names, found, strict=True)},
            }
            for pack, split, found in rows
        ]
        echo_json({"bench": bench, "results": results, "comparisons": tests})
        return
    shown = [
        [
            pack,
            split,
            "/".join(dict.fromkeys(str(one.n) for one in found)),
            *(interval(one) for one in found),
        ]
        for pack, split, found in rows
    ]
    for line in aligned(["pack", "split", "n", *names], shown):
        echo(line, painted=True)
    for test in tests:
        one = test["difference"]
        echo(
            f"{test['pack']} {test['split']}: {test['before']} to {test['after']}"
            f" {one['value']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}],"
            f" McNemar's exact test p = {test['p_value']:.3g}"
        )


def _values(one: Any) -> dict[str, Any]:
    return {"value": one.value, "low": one.low, "high": one.high, "n": one.n}
