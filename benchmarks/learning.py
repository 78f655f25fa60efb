"""The effect of training: base against trained, with and without tools, with the settings of `agentrl init`.

    python benchmarks/learning.py [--packs code-task calc-task] [--seeds 0 1 2] [--steps N] [--work DIR]

For every seed (the first alone for packs after the first): `agentrl init`, `agentrl train --seed S`, then `agentrl
eval` of base and best checkpoint on every task of the test split and of the held-out families, 4 attempts each at
temperature 1, and once more without tools. The best checkpoint is chosen on the validation split, which shares no task
with these. CPU and wall seconds are the sums of `time/cpu` and `time/step` of the steps: the training with its
sandbox, without start-up and evaluations.

Prints a Markdown table; writes benchmarks/results/learning.json and docs/learning.svg. With --work the projects are
kept and a second call resumes where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.store import RunRow, Store  # noqa: E402  # works without an installation

Result = dict[str, Any]

KNOWN = 0.8
"""Pass@1 from which the untrained base counts as solving a family."""
SMOOTH = 5
"""Steps averaged in a point of the curve."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette for colour-blind readers."""


def agentrl(*args: str, cwd: Path) -> str:
    """Run the command line like a user; returns its stdout. Narration goes to this process's stderr."""
    print(f"$ agentrl {' '.join(args)}", file=sys.stderr, flush=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "agentrl_cli", *args],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def measure(
    pack: str, seed: int, project: Path, steps: int | None, tasks: int, samples: int
) -> Result:
    """Train one seed and evaluate it."""
    if not project.is_dir():
        agentrl("init", pack, str(project), cwd=project.parent)
    train(project, seed, steps)
    run, curve, spent = read_curve(project)
    name = f"{run.name}@best"
    common = [
        "-k",
        str(samples),
        "-n",
        str(tasks),
        "-T",
        "1",
        "--seed",
        str(seed),
        "--resume",
        "--json",
    ]
    both = json.loads(
        agentrl("eval", "--checkpoint", name, "--compare-to", "base", *common, cwd=project)
    )
    alone = ["--checkpoint", name, "--compare-to", "none", "--no-tools", "--split", "test"]
    bare = json.loads(agentrl("eval", *alone, *common, cwd=project))
    base, trained = (one["splits"] for one in both["results"])
    return {
        "pack": pack,
        "seed": seed,
        "steps": run.step,
        **spent,
        "base": base,
        "trained": trained,
        "without_tools": bare["results"][0]["splits"]["test"],
        "comparison": {
            name: both["comparisons"][0][name]
            for name in ("difference", "gained", "lost", "p_value")
        },
        "curve": curve,
    }


def train(project: Path, seed: int, steps: int | None) -> None:
    """Train, or resume an interrupted training, unless there is a finished one."""
    db = project / "runs" / "agentrl.db"
    runs = []
    if db.is_file():
        with Store.open(db, readonly=True) as store:
            runs = [run for run in store.runs.all() if run.kind == "train"]
    if runs and runs[0].status == "finished":
        return
    count = ["--steps", str(steps)] if steps else []
    resume = ["--resume", runs[0].name] if runs else []
    agentrl("train", "--seed", str(seed), *count, *resume, cwd=project)


def read_curve(project: Path) -> tuple[RunRow, list[dict[str, float]], dict[str, float]]:
    """The newest training; of each step CPU seconds so far, share solved, share with a tool call; the seconds of all.

    Both sums are over the stored steps, so that they are of one training however often this script was interrupted.
    """
    db = project / "runs" / "agentrl.db"
    with Store.open(db, readonly=True) as store:
        run = next(run for run in store.runs.all() if run.kind == "train")
        steps = store.runs.steps(run.id)
    cpu = {int(row["step"]): float(row.get("time/cpu", 0.0)) for row in steps}
    wall = sum(float(row.get("time/step", 0.0)) for row in steps)
    conn = sqlite3.connect(f"file:{db}?mode=ro", uri=True)
    rows = conn.execute(
        "SELECT step, avg(outcome='solved'), avg(n_calls>0), avg(reward) FROM episodes WHERE run_id=? AND kind='train'"
        " AND outcome NOT IN ('env_error', 'sandbox_error', 'timeout', 'cancelled') GROUP BY step ORDER BY step",
        (run.id,),
    ).fetchall()
    conn.close()
    curve, spent = [], 0.0
    for step, solved, calls, reward in rows:
        done = step + 1  # metrics are stored under the number of finished steps
        spent += cpu.get(done, 0.0)
        point = {
            "step": done,
            "cpu": round(spent, 2),
            "solved": solved,
            "tool_call_rate": calls,
            "reward": reward,
        }
        curve.append(point)
    return run, curve, {"cpu_seconds": round(sum(cpu.values()), 2), "wall_seconds": round(wall, 1)}


# --- table -----------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Markdown: one line per run; pass rates with 95 % intervals."""
    heads = [
        "pack",
        "seed",
        "steps",
        "CPU s",
        "base",
        "trained",
        "the base knew",
        "held-out families",
    ]
    heads += ["tool calls", "without tools"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for one in results:
        base, trained = one["base"]["test"], one["trained"]["test"]
        held = [one[which].get("heldout") for which in ("base", "trained")]
        cells = [
            one["pack"],
            one["seed"],
            one["steps"],
            f"{one['cpu_seconds']:.0f}",
            interval(base),
            f"**{rate(trained):.3f}** {interval(trained).partition(' ')[2]}",
            knew(base),
            " → ".join(f"{rate(split):.3f}" for split in held if split) or "-",
            f"{base['tool_call_rate']:.2f} → {trained['tool_call_rate']:.2f}",
            f"{rate(one['without_tools']):.3f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for pack in dict.fromkeys(one["pack"] for one in results):
        own = [one for one in results if one["pack"] == pack]
        if len(own) > 1:
            means = [
                sum(map(rate, [one[which]["test"] for one in own])) / len(own)
                for which in ("base", "trained")
            ]
            cpu = sum(one["cpu_seconds"] for one in own) / len(own)
            lines += [
                "",
                f"{pack}, mean of {len(own)} seeds: {means[0]:.3f} → {means[1]:.3f} in {cpu:.0f} CPU seconds.",
            ]
    return "\n".join(lines)


def rate(split: Result) -> float:
    return float(split["pass_at"]["1"]["value"])


def knew(base: Result) -> str:
    """The families that the base solves before any training, with their pass@1; and of how many."""
    families = {name: rate(one) for name, one in base["families"].items()}
    solved = [f"{name} {value:.2f}" for name, value in sorted(families.items()) if value >= KNOWN]
    return f"{', '.join(solved) or 'none'} ({len(solved)} of {len(families)})"


def interval(split: Result) -> str:
    one = split["pass_at"]["1"]
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


# --- plot ------------------------------------------------------------------------------------------------------------


def svg(results: Sequence[Result], width: int = 760, height: int = 400) -> str:
    """The share of training attempts solved over CPU seconds, one line per run; dots: test split before and after."""
    left, right, top, bottom = 64, 190, 40, 52
    most = max((one["curve"][-1]["cpu"] for one in results if one["curve"]), default=1.0) or 1.0

    def x(seconds: float) -> float:
        return left + (width - left - right) * seconds / most

    def y(share: float) -> float:
        return top + (height - top - bottom) * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Share of attempts solved during training</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="22" font-size="15" fill="#222">Attempts solved, temperature 1</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{left} {y(share):.1f}H{width - right}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 8}" y="{y(share) + 4:.1f}" text-anchor="end" fill="#555">{share:.2f}</text>'
        )
    for seconds in ticks(most):
        parts.append(f'<path d="M{x(seconds):.1f} {y(0):.1f}v5" stroke="#999"/>')
        where = f'x="{x(seconds):.1f}" y="{y(0) + 20:.1f}"'
        parts.append(f'<text {where} text-anchor="middle" fill="#555">{seconds:g}</text>')
    middle = (left + width - right) / 2
    parts.append(
        f'<text x="{middle}" y="{height - 10}" text-anchor="middle" fill="#555">CPU seconds of training</text>'
    )
    for n, one in enumerate(results):
        parts += _line(one, COLOURS[n % len(COLOURS)], x, y, n, width - right + 16, top)
    note = (
        f"lines: training, {SMOOTH}-step mean",
        "dots: test split before",
        "and after, 95 % interval",
    )
    for n, text in enumerate(note):
        place = f'x="{width - right + 16}" y="{height - bottom - 34 + 16 * n}"'
        parts.append(f'<text {place} font-size="11" fill="#777">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _line(one: Result, colour: str, x: Any, y: Any, n: int, legend: float, top: float) -> list[str]:
    curve = one["curve"]
    values = [point["solved"] for point in curve]
    windows = [values[max(0, end - SMOOTH) : end] for end in range(1, len(values) + 1)]
    means = [sum(window) / len(window) for window in windows]
    points = " ".join(
        f"{x(point['cpu']):.1f},{y(mean):.1f}" for point, mean in zip(curve, means, strict=True)
    )
    dash = "" if one["pack"] == "code-task" else ' stroke-dasharray="6 3"'
    parts = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    for which, seconds in (("base", 0.0), ("trained", one["cpu_seconds"])):
        found = one[which]["test"]["pass_at"]["1"]
        place = x(seconds)
        parts.append(
            f'<path d="M{place:.1f} {y(found["low"]):.1f}V{y(found["high"]):.1f}" stroke="{colour}"/>'
        )
        parts.append(
            f'<circle cx="{place:.1f}" cy="{y(found["value"]):.1f}" r="4" fill="{colour}"/>'
        )
    height = top + 8 + 22 * n
    label = escape(f"{one['pack']}, seed {one['seed']}")
    parts.append(f'<path d="M{legend} {height}h22" stroke="{colour}" stroke-width="2"{dash}/>')
    parts.append(f'<text x="{legend + 30}" y="{height + 4}" fill="#222">{label}</text>')
    return parts


def ticks(most: float, count: int = 6) -> list[float]:
    """Round numbers from 0 to at most `most`, about `count` of them."""
    step = 1.0
    while most / step > count:
        step *= 2.5 if str(step)[0] == "2" else 2
    return [step * n for n in range(int(most / step) + 1)]


# --- the whole -------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }


def write(results: Sequence[Result], out: Path, plot: Path) -> None:
    """Writes the results after every run, since a run may take an hour."""
    out.parent.mkdir(parents=True, exist_ok=True)
    plot.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"machine": machine(), "at": time.strftime("%Y-%m-%d"), "results": results}, indent=1
    )
    out.write_text(text + "\n", encoding="utf-8")
    plot.write_text(svg(results), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packs", nargs="+", default=["code-task", "calc-task"])
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="of the first pack; others: the first",
    )
    parser.add_argument("--steps", type=int, help="training steps; default: what init writes")
    parser.add_argument(
        "--tasks", type=int, default=1000, help="at most this many tasks of a split; default: all"
    )
    parser.add_argument("--samples", type=int, default=4, help="attempts at each task")
    parser.add_argument("--work", type=Path, help="keep the projects here and resume them")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "learning.json"
    )
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "learning.svg")
    args = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-learning-") as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for pack in args.packs:
            for seed in args.seeds if pack == args.packs[0] else args.seeds[:1]:
                project = work / f"{pack}-{seed}"
                results.append(measure(pack, seed, project, args.steps, args.tasks, args.samples))
                write(results, args.out, args.plot)
                print(table(results[-1:]), file=sys.stderr)
    print(table(results))


if __name__ == "__main__":
    main()
