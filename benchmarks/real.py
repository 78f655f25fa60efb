"""A real model learns on a CPU: SmolLM2-135M-Instruct before, after demonstrations, and after GRPO with LoRA.

    python benchmarks/real.py --work DIR [--packs calc-task guess-task] [--seeds 0] [--sft 16] [--steps 24]
    python benchmarks/real.py --work DIR --packs benchmarks/lichen --also FOLDER

`benchmarks/lichen` is a tool that a stranger invented and named. `--also` evaluates further models on the pack, such as
an adapter that was trained on another. For every pack and seed: `agentrl init`, `eval` of the base, `sft` on the pack's
demonstrations, `eval`, `train` from there, `eval`. The evaluations have the same tasks of the test split and seeds, one
attempt each at temperature 1. CPU seconds are those of each command's process and its children, start-up included.

Writes DIR/real.json after every command; a second call goes on where the first one stopped. benchmarks/real.md has the
figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = """\
model: {dtype: DTYPE}
adapter: {enabled: true, r: 16, alpha: 32}
rollout: {group_size: 8, prompts_per_step: 4, max_new_tokens: NEW, max_tokens: 384}
train: {lr: 2.0e-4, token_budget: 4096, eval: 0, save: 4}
"""
TURN = {"guess-task": 16}
"""Most tokens of a turn, if a pack needs fewer than 64."""


class Record:
    """What was measured, by the command's name; written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        )

    def measure(self, key: str, args: list[str], cwd: Path) -> Any:
        """Run a command of agentrl once and return what it printed as JSON."""
        if key not in self.found:
            print(f"$ agentrl {' '.join(args)}", file=sys.stderr, flush=True)
            before, begun = os.times(), time.monotonic()
            # The place of the code may be another than this file's, so that it does not change during a run.
            env = {"PYTHONPATH": str(ROOT), **os.environ}
            command = [sys.executable, "-m", "agentrl_cli", *args]
            done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, check=True)
            after = os.times()
            cpu = after[2] + after[3] - before[2] - before[3]
            self.found[key] = {
                "command": args,
                "cpu_s": round(cpu, 1),
                "wall_s": round(time.monotonic() - begun, 1),
                "out": _values(done.stdout.decode()) if "--json" in args else None,
            }
            self.path.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        return self.found[key]["out"]


def _values(text: str) -> Any:
    """Return the JSON value of a text, or the values of its lines."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def learn(given: str, seed: int, args: argparse.Namespace, record: Record) -> None:
    """Measure base, demonstrations and GRPO on a pack, given by name or by folder, with a seed."""
    folder = Path(given).resolve()
    place, pack = (str(folder), folder.name) if folder.is_dir() else (given, given)
    project = args.work / f"{pack}-{seed}"
    name = f"{pack} {seed}"
    if not project.is_dir():
        record.found.pop(f"{name} init", None)
    record.measure(f"{name} init", ["init", place, str(project), "--model", args.model], args.work)
    settings = SETTINGS.replace("DTYPE", args.dtype).replace("NEW", str(TURN.get(pack, 64)))
    (project / "real.yaml").write_text(settings, encoding="utf-8")
    ways = ["--config", "real.yaml", "--seed", str(seed), "--json"]
    asked = ["--split", "test", "-n", str(args.tasks), "-k", "1", "-T", "1", *ways]
    record.measure(f"{name} base", ["eval", "--model", args.model, *asked], project)
    for other in args.also:
        model = str(Path(other).resolve())
        record.measure(f"{name} also {other}", ["eval", "--model", model, *asked], project)
    sft = ["sft", "warm", "--steps", str(args.sft), "--lr", "1e-3", "--force", *ways]
    record.measure(f"{name} sft", sft, project)
    record.measure(f"{name} warm", ["eval", "--model", "warm", *asked], project)
    train = ["train", "--model", "warm", "--steps", str(args.steps), *ways]
    record.measure(f"{name} grpo", train, project)
    record.measure(f"{name} trained", ["eval", "--model", f"{pack}-grpo@last", *asked], project)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--packs", nargs="+", default=["calc-task", "guess-task"])
    parser.add_argument("--also", nargs="*", default=[], help="models that are evaluated beside it")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--sft", type=int, default=16, help="steps of 16 demonstrations")
    parser.add_argument(
        "--steps", type=int, default=24, help="steps of GRPO, 4 tasks of 8 episodes"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="float32 on processors without bfloat16"
    )
    parser.add_argument("--tasks", type=int, default=40, help="tasks of each evaluation")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    record = Record(args.work / "real.json")
    if (before := record.found.setdefault("dtype", args.dtype)) != args.dtype:
        parser.error(f"{args.work} has figures of {before}: name another folder")
    for seed in args.seeds:
        for pack in args.packs:
            learn(pack, seed, args, record)


if __name__ == "__main__":
    main()
