"""Does each algorithm learn? `code-task` with seven of them, three seeds, within a number of updates fixed in advance.

    python benchmarks/algorithms.py [--work DIR] [--names GRPO PPO] [--seeds 0 1 2] [--steps 80]

One run at a time, each started like a user's: `agentrl init code-task`, `agentrl train --set …`, then `agentrl
eval` of the last checkpoint on every task of the test split, 4 attempts each at temperature 1, and of the base model
once a seed. A run passes if base is at most 0.5 and the trained model reaches 0.8. STEPS was fixed before the first
of these runs, after exploratory ones of PPO and GSPO with a seed that is not in the table (`--seeds 7 --steps 100`:
0.92 and 0.92 held-out, and 0.9 of the training attempts solved at step 30) and GRPO's curves in results/learning.json.

GRPO, Dr.GRPO, RLOO and REINFORCE++ make one optimizer step of a step's episodes, so their ratio is 1; CISPO, GSPO and
PPO make two, of half the groups each, since with one their clips would have no effect.

Writes benchmarks/results/algorithms.json after every run; with --work a second call resumes where the first stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.store import Store  # noqa: E402  # works without an installation
from benchmarks.learning import agentrl, interval, knew, machine, rate, read_curve  # noqa: E402

Result = dict[str, Any]

STEPS = 80
"""Fixed in advance."""
BASE, WANTED = 0.5, 0.8
TWO = "algo.minibatches=2"
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "GRPO": (),
    "Dr.GRPO": ("algo.advantage=dr_grpo",),
    "RLOO": ("algo.advantage=rloo",),
    "REINFORCE++": ("algo.advantage=reinforce_pp",),
    "CISPO": ("algo.loss=cispo", TWO),
    "GSPO": ("algo.loss=gspo", "algo.loss.clip_low=0.03", "algo.loss.clip_high=0.04", TWO),
    "PPO": ("algo.advantage=gae", TWO),
}
"""Settings besides the pack's own; a sequence's mean ratio moves less than a token's, so GSPO's clip is
narrower."""


def project_of(work: Path, name: str, seed: int) -> Path:
    """The project of one run, created if missing."""
    project = work / f"{name.lower().replace('+', 'p').replace('.', '')}-{seed}"
    if not project.is_dir():
        agentrl("init", "code-task", str(project), cwd=work)
    return project


def train(project: Path, seed: int, steps: int, sets: Sequence[str]) -> None:
    """Train, or resume an interrupted training, unless there is a finished one."""
    db = project / "runs" / "agentrl.db"
    runs = []
    if db.is_file():
        with Store.open(db, readonly=True) as store:
            runs = [run for run in store.runs.all() if run.kind == "train"]
    if runs and runs[0].status == "finished":
        return
    given = [part for text in (*sets, "train.eval.every=0") for part in ("--set", text)]
    resume = ["--resume", runs[0].name] if runs else []
    agentrl("train", "--seed", str(seed), "--steps", str(steps), *given, *resume, cwd=project)


def evaluate(project: Path, checkpoint: str, seed: int, tasks: int) -> Result:
    """pass@1 on the test split, with its interval."""
    facts = [
        "--compare-to",
        "none",
        "--split",
        "test",
        "-k",
        "4",
        "-n",
        str(tasks),
        "-T",
        "1",
        "--seed",
        str(seed),
    ]
    found = json.loads(
        agentrl("eval", "--checkpoint", checkpoint, *facts, "--resume", "--json", cwd=project)
    )
    split: Result = found["results"][0]["splits"]["test"]
    return split


def measure(work: Path, name: str, seed: int, steps: int, tasks: int, base: Result) -> Result:
    """One run of one algorithm."""
    project = project_of(work, name, seed)
    train(project, seed, steps, ALGORITHMS[name])
    run, curve, spent = read_curve(project)
    trained = evaluate(project, f"{run.name}@last", seed, tasks)
    return {
        "algorithm": name,
        "set": list(ALGORITHMS[name]),
        "seed": seed,
        "steps": run.step,
        **spent,
        "base": base,
        "trained": trained,
        "passed": rate(base) <= BASE and rate(trained) >= WANTED,
        "reached": next(
            (n for n, mean in enumerate(_smooth(curve), 1) if n >= 5 and mean >= WANTED), None
        ),
        "curve": curve,
    }


def _smooth(curve: Sequence[Mapping[str, float]]) -> list[float]:
    values = [point["solved"] for point in curve]
    windows = [values[max(0, end - 5) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def table(results: Sequence[Result]) -> str:
    """Markdown: one line per algorithm, the seeds side by side."""
    lines = [
        "| algorithm | settings | base | the base knew | trained, by seed | training attempts reach 0.8 at step | CPU s"
        " | passed |",
        "|" + " --- |" * 8,
    ]
    for name in dict.fromkeys(one["algorithm"] for one in results):
        own = [one for one in results if one["algorithm"] == name]
        cells = [
            name,
            "<br>".join(f"`{text}`" for text in own[0]["set"]) or "defaults",
            ", ".join(f"{rate(one['base']):.3f}" for one in own),
            "<br>".join(knew(one["base"]) for one in own),
            ", ".join(interval(one["trained"]) for one in own),
            ", ".join(str(one["reached"] or "never") for one in own),
            f"{sum(one['cpu_seconds'] for one in own) / len(own):.0f}",
            f"{sum(one['passed'] for one in own)} of {len(own)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--tasks", type=int, default=1000, help="maximum tasks of the test split; default: all"
    )
    parser.add_argument("--work", type=Path, help="keep the projects here and resume them")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "algorithms.json"
    )
    args = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-algorithms-") as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds:
            base = evaluate(project_of(work, "base", seed), "base", seed, args.tasks)
            for name in args.names:
                results.append(measure(work, name, seed, args.steps, args.tasks, base))
                facts = {"machine": machine(), "at": time.strftime("%Y-%m-%d"), "steps": args.steps}
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(
                    json.dumps({**facts, "results": results}, indent=1) + "\n", encoding="utf-8"
                )
                print(table(results[-1:]), file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
