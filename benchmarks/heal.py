"""Does `train --heal` save a training whose learning rate is five times too high? Three packs, seven seeds.

    python benchmarks/heal.py --work DIR [--packs …] [--seeds …] [--kinds clean high healed]

`clean`: the pack's own learning rate. `high`: five times it. `healed`: five times it with `--heal`. Each is `agentrl
init`, `agentrl train --seed S`, then pass@1 of the best checkpoint, chosen on the validation split, on 80 tasks of the
test split, 2 attempts each at temperature 1. A healed run counts as saved if its best checkpoint reaches 95 % of
the mean of its pack's clean runs. CPU seconds are the sum of `time/cpu` of the steps.

Prints a Markdown table; writes benchmarks/results/heal.json after every run. A second call resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.config import load_config  # noqa: E402  # works without an installation
from agentrl_cli.store import Store  # noqa: E402
from benchmarks.learning import agentrl, machine  # noqa: E402

PACKS = {"search-task": 60, "sql-task": 60, "code-task": 30}
"""Steps of a training: the packs' own number, but of code-task, whose own are 200."""
SHORT = ["train.eval.every=8", "train.eval.samples=1"]
KINDS = ("clean", "high", "healed")
TIMES = 5
"""Learning rate of a `high` or `healed` training over the pack's."""
SHARE = 0.95


def measure(pack: str, kind: str, seed: int, work: Path) -> dict[str, Any]:
    """Train and evaluate one; what --work has of it is not done again."""
    project = work / f"{pack}-{kind}-{seed}"
    kept = project / "result.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    if not project.is_dir():
        agentrl("init", pack, str(project), cwd=work)
    name = train(project, pack, kind, seed)
    result = {"pack": pack, "kind": kind, "seed": seed, **read(project, name)}
    common = ["--compare-to", "none", "--split", "test", "-k", "2", "-n", "80", "-T", "1"]
    words = [f"{name}@best", *common, "--seed", str(seed), "--resume", "--json"]
    found = json.loads(agentrl("eval", *words, cwd=project))
    result["best"] = found["results"][0]["splits"]["test"]["pass_at"]["1"]
    kept.write_text(json.dumps(result), encoding="utf-8")
    return result


def train(project: Path, pack: str, kind: str, seed: int) -> str:
    """Train to the end, or resume. Returns the run's name."""
    db = project / "runs" / "agentrl.db"
    runs = []
    if db.is_file():
        with Store.open(db, readonly=True) as store:
            runs = [run for run in store.runs.all() if run.kind == "train"]
    if not runs:
        lr = load_config((), base=project)[0].train.lr * (1 if kind == "clean" else TIMES)
        words = ["--seed", str(seed), "--steps", str(PACKS[pack]), "--lr", f"{lr:g}"]
        words += [word for setting in SHORT for word in ("--set", setting)]
        agentrl("train", *words, *["--heal"] * (kind == "healed"), cwd=project)
    elif runs[0].status != "finished" or runs[0].step < PACKS[pack]:
        agentrl("train", "--resume", runs[0].name, "--steps", str(PACKS[pack]), cwd=project)
    with Store.open(db, readonly=True) as store:
        return next(run.name for run in store.runs.all() if run.kind == "train")


def read(project: Path, name: str) -> dict[str, Any]:
    """Return the steps of a training, its CPU seconds, its curve and its healings."""
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = store.runs.get(name)
        rows = store.runs.steps(run.id)
        evals = [(row.step, row.pass_rate) for row in store.runs.evals(run.id)]
        events = [e["data"] for e in store.journal.events(run.id) if e["kind"] == "healed"]
    return {
        "steps": run.step,
        "status": run.status,
        "cpu_seconds": round(sum(float(row.get("time/cpu", 0.0)) for row in rows), 1),
        "solved": [round(float(row.get("solved", 0.0)), 3) for row in rows if row["step"]],
        "evals": evals,
        "healed": events,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line per run, then how many were saved."""
    heads = "pack seed clean five-fold healed changes saved".split()
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    saved, high, count = 0, 0, 0
    by = {(one["pack"], one["kind"], one["seed"]): one for one in results}
    means = {
        p: [o["best"]["value"] for o in results if (o["pack"], o["kind"]) == (p, "clean")]
        for p in PACKS
    }
    for pack, seed in dict.fromkeys((one["pack"], one["seed"]) for one in results):
        three = [by.get((pack, kind, seed)) for kind in KINDS]
        goal = SHARE * fmean(means[pack] or [1.0])
        cells = [f"{one['best']['value']:.3f}" if one else "-" for one in three]
        verdict, changes = "-", "-"
        if three[1]:
            high += three[1]["best"]["value"] >= goal
        if three[2]:
            count, saved = count + 1, saved + (three[2]["best"]["value"] >= goal)
            verdict = "yes" if three[2]["best"]["value"] >= goal else "no"
            changes = ", ".join(f"{e['rule']} at {e['step']}" for e in three[2]["healed"]) or "none"
        lines.append(f"| {pack} | {seed} | {' | '.join(cells)} | {changes} | {verdict} |")
    shown = ", ".join(
        f"{pack} {fmean(found):.3f} ({len(found)} seeds)" for pack, found in means.items() if found
    )
    text = f"{saved} of {count} healed runs reach {SHARE:.0%} of the clean mean: {shown}."
    if tried := sum(one["kind"] == "high" for one in results):
        text += f" Without --heal {high} of {tried} do."
    return "\n".join([*lines, "", text])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packs", nargs="+", choices=list(PACKS), default=list(PACKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(7)))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--work", type=Path, required=True, help="keep the projects here, and resume them"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "heal.json")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in args.seeds:
        for pack in args.packs:
            for kind in args.kinds:
                results.append(measure(pack, kind, seed, work))
                text = json.dumps({"machine": machine(), "results": results}, indent=1)
                args.out.write_text(text + "\n", encoding="utf-8")
                print(table(results).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
