"""Wall and CPU time of a training step with a slow tool, synchronous and asynchronous (`rollout.async_staleness`).

    python benchmarks/staleness.py [--delay 0.5] [--steps 6] [--rounds 2] [--staleness 0 1 2] [--out FILE]

The bundled model on calc-task; the calculator sleeps `--delay` seconds more. In every round each setting trains once,
so that slow phases of the machine affect all of them. Each training's first step (loading, nothing prefetched yet) and
last `staleness` steps (nothing left to prefetch) are left out; the wall time of the whole training is also reported.
Prints a JSON line for each training, and at the end the table: means per step of wall seconds (`step`, of which
`rollout` are spent waiting and `update` computing), CPU seconds (`cpu`), tool calls (the same work), and the speedup
over the first setting, with the smallest and the largest of the rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl_cli import Config, load_pack, train
from agentrl_cli.paths import packs_dir
from agentrl_cli.store import Store
from agentrl_cli.tools.calculator import TOOL, calculator

NAMES = ("step", "rollout", "update", "cpu")


def slow_down(delay: float) -> None:
    """Makes the calculator answer `delay` seconds later, in a thread."""

    def slow(expression: str) -> Any:
        time.sleep(delay)  # in a thread, like every synchronous tool
        return calculator(expression)

    TOOL.function, TOOL.pure = slow, False


def measure(staleness: int, steps: int) -> dict[str, Any]:
    """One training: means over its steady steps."""
    rollout = {"async_staleness": staleness, "group_size": 4, "prompts_per_step": 4}
    algo = {"skip": {"zero_variance": False}}  # so that every step has an update of the same size
    config = Config.model_validate({"rollout": rollout, "train": {"steps": steps}, "algo": algo})
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall = time.process_time(), time.monotonic()
        run = train(
            config,
            packs=[load_pack(packs_dir() / "calc-task")],
            project=folder,
            narrate=lambda text: None,
        )
        whole = {"whole_wall": time.monotonic() - wall, "whole_cpu": time.process_time() - cpu}
        with Store.open(Path(folder) / "runs" / "agentrl.db") as store:
            rows = store.runs.steps(run.id)[1 : steps - staleness]
    mean = {name: sum(row[f"time/{name}"] for row in rows) / len(rows) for name in NAMES}
    ages = {"staleness": max(row.get("staleness/max", 0.0) for row in rows)}
    calls = {"tool_calls": sum(row["tools/call_frequency"] for row in rows) / len(rows)}
    return {
        "async_staleness": staleness,
        **mean,
        **ages,
        **calls,
        **whole,
        "steady_steps": len(rows),
    }


def table(rounds: list[dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Per setting the mean of the rounds, and the speedup over the first with its range."""
    first = next(iter(rounds[0]))
    found = {}
    for setting in rounds[0]:
        every = [one[setting] for one in rounds]
        row = {
            name: sum(one[name] for one in every) / len(every)
            for name in (*NAMES, "tool_calls", "whole_wall")
        }
        for name in ("step", "cpu", "whole_wall"):
            gains = [one[first][name] / one[setting][name] for one in rounds]
            row |= {
                f"{name}_gain": sum(gains) / len(gains),
                f"{name}_gain_range": [min(gains), max(gains)],
            }
        found[str(setting)] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    given = parser.parse_args()
    if given.steps < max(given.staleness) + 2:
        parser.error(f"--steps must be at least {max(given.staleness) + 2}")
    measure(0, 2)  # everything is imported and loaded once
    slow_down(given.delay)
    rounds: list[dict[int, dict[str, Any]]] = []
    for _ in range(given.rounds):
        rounds.append({})
        for setting in given.staleness:
            rounds[-1][setting] = measure(setting, given.steps)
            print(json.dumps(_short(rounds[-1][setting])), flush=True)
    result: dict[str, Any] = {
        "delay": given.delay,
        "steps": given.steps,
        "rounds": given.rounds,
        "settings": table(rounds),
    }
    for setting, row in result["settings"].items():
        print(
            json.dumps(
                {"mean_of_rounds": given.rounds, "async_staleness": int(setting), **_short(row)}
            )
        )
    if given.out is not None:
        given.out.write_text(
            json.dumps({**result, "trainings": rounds}, indent=1) + "\n", encoding="utf-8"
        )


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
