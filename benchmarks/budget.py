"""Is `train --budget 3m` at least as good as a pack's own settings in the same time? Pass@1 after equal CPU seconds.

    python benchmarks/budget.py --work DIR [--packs …] [--seeds 0 1 2] [--budget 3m]

For each pack and seed: `agentrl init`, `agentrl train --budget TIME --seed S`, its CPU seconds from start to end (the
probe, loading and evaluations included); then the pack's own settings with as many steps as take the same CPU seconds,
resumed until they do. Then pass@1 of the best checkpoint (of the last one if no evaluation came after the base's) on
80 tasks of the test split, 2 attempts each at temperature 1.

Prints a Markdown table; writes benchmarks/results/budget.json after every pair. A second call skips what it has.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.store import RunRow, Store  # noqa: E402  # works without an installation
from benchmarks.learning import agentrl, machine  # noqa: E402

PACKS = ("calc-task", "search-task", "code-task", "sql-task", "echo-task")
ENOUGH = 0.95
"""Share of the budget's CPU seconds that the pack's own settings get at least."""


def cpu(*words: str, cwd: Path) -> float:
    """Return the CPU seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    agentrl(*words, cwd=cwd)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def read(project: Path) -> tuple[RunRow, list[dict[str, Any]], dict[str, Any], bool]:
    """Return the newest training, its steps, how its budget was spent, and whether it evaluated after the base."""
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = max(
            (one for one in store.runs.all() if one.kind == "train"), key=lambda one: one.started
        )
        rows = [row for row in store.runs.steps(run.id) if row["step"]]
        judged = any(row.step for row in store.runs.evals(run.id))
        return run, rows, store.journal.newest_event(run.id, "budget") or {}, judged


def judge(project: Path, seed: int) -> dict[str, Any]:
    run, rows, record, judged = read(project)
    common = ["--compare-to", "none", "--split", "test", "-k", "2", "-n", "80", "-T", "1"]
    name = f"{run.name}@{'best' if judged else 'last'}"
    found = json.loads(agentrl("eval", name, *common, "--seed", str(seed), "--json", cwd=project))
    value = found["results"][0]["splits"]["test"]["pass_at"]["1"]
    solved = [round(float(row.get("solved", 0.0)), 3) for row in rows]
    return {"steps": run.step, "pass": value, "record": record, "solved": solved}


def measure(pack: str, seed: int, budget: str, work: Path) -> dict[str, Any]:
    """Train both, and evaluate them."""
    kept = work / f"{pack}-{seed}.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    with_budget, plain = (work / f"{pack}-{seed}-{name}" for name in ("budget", "own"))
    for project in (with_budget, plain):
        agentrl("init", pack, str(project), cwd=work)
    spent = cpu("train", "--budget", budget, "--seed", str(seed), cwd=with_budget)
    mine = judge(with_budget, seed)
    steps, used = 5, cpu("train", "--seed", str(seed), "--steps", "5", cwd=plain)
    opening = used - sum(float(row["time/cpu"]) for row in read(plain)[1])
    while used < ENOUGH * spent:
        each = sum(float(row["time/cpu"]) for row in read(plain)[1]) / steps
        steps += max(1, int((spent - used) / each))
        again = ["train", "--resume", "last", "--steps", str(steps)]
        used += max(each, cpu(*again, cwd=plain) - opening)
    own = judge(plain, seed)
    result = {
        "pack": pack,
        "seed": seed,
        "budget": mine | {"cpu": spent},
        "own": own | {"cpu": used},
    }
    kept.write_text(json.dumps(result), encoding="utf-8")
    return result


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each pair."""
    heads = ["pack", "seed", "own settings", "--budget", "CPU s", "steps"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for one in results:
        own, mine = one["own"], one["budget"]
        cells = [
            f"{x['pass']['value']:.3f} [{x['pass']['low']:.3f}, {x['pass']['high']:.3f}]"
            for x in (own, mine)
        ]
        both = [f"{own['cpu']:.0f}, {mine['cpu']:.0f}", f"{own['steps']}, {mine['steps']}"]
        lines.append("| " + " | ".join([one["pack"], str(one["seed"]), *cells, *both]) + " |")
    better = sum(one["budget"]["pass"]["value"] > one["own"]["pass"]["value"] for one in results)
    return "\n".join([*lines, "", f"--budget is better in {better} of {len(results)} pairs."])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packs", nargs="+", default=list(PACKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--work", type=Path, required=True, help="keep the projects here")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "budget.json")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in args.seeds:
        for pack in args.packs:
            results.append(measure(pack, seed, args.budget, work))
            text = json.dumps({"machine": machine(), "results": results}, indent=1)
            args.out.write_text(text + "\n", encoding="utf-8")
            print(table(results).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
