"""Wall and CPU time of a training step with a slow tool, sampled in turn and sampled ahead (`rollout.async_staleness`).

    python benchmarks/staleness.py [--delay 0.5] [--steps 6] [--staleness 0 1 2]

The bundled model on calc-task; the calculator takes `--delay` seconds more. The first step, in which everything is
loaded and nothing runs ahead yet, is left out. Prints a JSON line per setting: means per step of wall seconds (`step`,
`rollout`, `update`) and CPU seconds (`cpu`), and how many times the steps of the first setting it is as fast.
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


def slow_down(delay: float) -> None:
    """The calculator answers `delay` seconds later, and no longer promises to be quick."""

    def slow(expression: str) -> Any:
        time.sleep(delay)  # in a thread of its own, as every plain function that does not promise to be quick
        return calculator(expression)

    TOOL.function, TOOL.pure = slow, False


def measure(staleness: int, delay: float, steps: int) -> dict[str, Any]:
    slow_down(delay)
    rollout = {"async_staleness": staleness, "group_size": 4, "prompts_per_step": 4}
    algo = {"drop_zero_variance": False}  # so that every step has an update of the same size
    config = Config.model_validate({"rollout": rollout, "train": {"steps": steps}, "algo": algo})
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        run = train(config, packs=[load_pack(packs_dir() / "calc-task")], project=folder, narrate=lambda text: None)
        wall = time.monotonic() - started
        with Store.open(Path(folder) / "runs" / "agentrl.db") as store:
            rows = store.steps(run.id)[1:]
    mean = {name: sum(row[f"time/{name}"] for row in rows) / len(rows) for name in ("step", "rollout", "update", "cpu")}
    ages = {"staleness": max(row.get("staleness/max", 0.0) for row in rows)}
    calls = {"tool_calls": sum(row["tools/call_frequency"] for row in rows) / len(rows)}
    return {"async_staleness": staleness, **mean, **ages, **calls, "wall": wall}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    first: dict[str, Any] = {}
    for number in given.staleness:
        found = measure(number, given.delay, given.steps)
        first = first or found
        found |= {f"{name}_gain": first[name] / found[name] for name in ("step", "cpu")}
        print(json.dumps({k: round(v, 3) for k, v in found.items()}), flush=True)
