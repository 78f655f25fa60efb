"""The bundled model learns through the gateway: calc-task by examples/math_agent, beside the built-in loop.

    python benchmarks/agents_learning.py [--ways agent built-in lightning] [--seeds 0 1 2] [--steps 80] [--work DIR]

All have the same tasks, settings and seeds. `lightning` is the LitAgent of examples/lightning/calculator.py under
`Trainer.fit`, evaluated as math-agent. For each way and seed: the training, then `agentrl eval` of the
base and of the last checkpoint on the validation split (4 attempts each at temperature 1). CPU seconds are those of
the training's process. Needs the openai client. With --work a second call does what the first had not done.
Writes benchmarks/results/agents_learning.json after every run, and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.store import Store  # noqa: E402  # works without an installation

RESULTS = ROOT / "benchmarks" / "results" / "agents_learning.json"
AGENT = (str(ROOT / "examples" / "math_agent"), "math-agent")
PACKS = {"agent": AGENT, "built-in": ("calc-task", "calc-task"), "lightning": AGENT}
SCRIPT = ROOT / "examples" / "lightning" / "calculator.py"
CURVE = 10
"""Points of a curve."""


def agentrl(
    *args: str, cwd: Path, program: tuple[str, ...] = ("-m", "agentrl_cli"), **env: str
) -> str:
    """Run the command line like a user; returns its stdout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, *program, *args]
    return subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def measure(way: str, seed: int, steps: int, work: Path) -> dict[str, Any]:
    """Train one seed one way, and evaluate it."""
    project = work / f"{way}-{seed}"
    project.mkdir(parents=True, exist_ok=True)
    pack, name = PACKS[way]
    (project / "agentrl.yaml").write_text(
        f"model: {{name: tiny}}\ntask: {{packs: [{pack}]}}\ntrain: {{eval: 0}}\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if way == "lightning":
        agentrl("--steps", str(steps), cwd=project, program=(str(SCRIPT),), AGENTRL_SEED=str(seed))
    else:
        agentrl("train", "--steps", str(steps), "--seed", str(seed), cwd=project)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = next(row for row in store.runs.all() if row.kind == "train")
        solved = store.conn.execute(
            "SELECT step, avg(outcome = 'solved') FROM episodes WHERE run_id = ? AND kind = 'train' GROUP BY step",
            (run.id,),
        ).fetchall()
    given = [
        "--compare-to",
        "base",
        "--split",
        "validation",
        "-k",
        "4",
        "-T",
        "1",
        "--seed",
        str(seed),
        "--json",
    ]
    both = json.loads(agentrl("eval", "--checkpoint", f"{run.name}@last", *given, cwd=project))
    base, trained = (one["splits"]["validation"]["pass_at"]["1"] for one in both["results"])
    size = -(-len(solved) // CURVE)
    curve = [
        sum(row[1] for row in solved[n : n + size]) / len(solved[n : n + size])
        for n in range(0, len(solved), size)
    ]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "way": way, "pack": name, "seed": seed, "steps": len(solved), "base": base, "trained": trained,
        "cpu_seconds": round(cpu, 1), "curve": [round(value, 3) for value in curve],
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, one line a run."""
    lines = [
        "| way | seed | steps | base pass@1 | trained pass@1 | CPU s | solved, by tenths of the steps |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in sorted(rows, key=lambda row: (row["way"], row["seed"])):
        numbers = [_number(row[name]) for name in ("base", "trained")]
        curve = " ".join(f"{value:.2f}" for value in row["curve"])
        cells = [
            row["way"],
            row["seed"],
            row["steps"],
            *numbers,
            f"{row['cpu_seconds']:.0f}",
            curve,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _number(value: Any) -> str:
    """A rate, with its interval if it has one."""
    return f"{value['value']:.3f}" if isinstance(value, dict) else f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", choices=[*PACKS], nargs="+", default=["agent", "built-in"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = (
        json.loads(RESULTS.read_text()) if given.work and RESULTS.is_file() else []
    )
    with tempfile.TemporaryDirectory() as folder:
        for way in given.ways:
            for seed in given.seeds:
                if not any(
                    (row["way"], row["seed"], row["steps"]) == (way, seed, given.steps)
                    for row in rows
                ):
                    rows.append(measure(way, seed, given.steps, given.work or Path(folder)))
                    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
