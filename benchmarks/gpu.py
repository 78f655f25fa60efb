"""Everything that is known of a GPU, by one command: a JSON file to send back, also if something in it fails.

    python benchmarks/gpu.py [--out gpu.json] [--device cuda] [--model 0.5B] [--quick]

In order: `agentrl doctor --gpu`; the tests marked `gpu`; `rollout.py generate` beside `generate` and transformers'
continuous batching; single decode steps, eager and as CUDA graphs (`rollout_steps.py`); an update under LoRA with its
peak memory beside the plan's. Each part is a process of its own. About 20 minutes at 0.5B.
`--device cpu --model 3M --quick` only checks the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # works without an installation

LIMIT = 1800.0
"""Seconds of a part."""


def parts(device: str, model: str, quick: bool, folder: Path) -> dict[str, list[str]]:
    """The command of each part; those with `--out` write a JSON file there, the others print."""
    python, here = sys.executable, str(ROOT / "benchmarks")
    episodes, rows = ("8", ["8"]) if quick else ("64", ["64", "256"])
    of = ["--device", device, "--model", model]
    seconds = ["--seconds", "1"] if quick else []
    rounds, steps = ("--rounds", "1" if quick else "3"), ("--steps", "4" if quick else "40")

    def to(name: str) -> tuple[str, str]:
        return "--out", str(folder / f"{name}.json")

    return {
        "doctor": [
            python,
            "-m",
            "agentrl_cli",
            "doctor",
            "--gpu",
            "--device",
            device,
            *seconds,
            "--json",
        ],
        "tests": [
            python,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-m",
            "gpu",
            "-rs",
            str(ROOT / "tests/inference"),
        ],
        "rollout": [
            python,
            f"{here}/rollout.py",
            "generate",
            *of,
            "--episodes",
            episodes,
            *rounds,
            *to("rollout"),
        ],
        "steps": [python, f"{here}/rollout_steps.py", *of, "--rows", *rows, *steps, *to("steps")],
        "update": [python, f"{here}/gpu.py", "--update", *of, *["--quick"] * quick],
    }


def run(command: list[str], folder: Path) -> dict[str, Any]:
    """A part's result, or what it said at its end."""
    started = time.monotonic()
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, check=False, cwd=ROOT
        )
        status, said, failed = child.returncode, child.stdout, child.stderr
    except subprocess.TimeoutExpired:
        status, said, failed = -1, "", f"no answer within {LIMIT:g} s"
    out = folder / Path(command[command.index("--out") + 1]).name if "--out" in command else None
    text = out.read_text(encoding="utf-8") if out is not None and out.is_file() else said
    try:
        result = json.loads(text)
    except ValueError:
        result = text.strip().splitlines()[-12:]
    found = {"status": status, "seconds": round(time.monotonic() - started, 1), "result": result}
    return found if status == 0 else {**found, "error": failed.strip().splitlines()[-12:]}


def update(device: str, model: str, quick: bool) -> dict[str, Any]:
    """Seconds of an update of tool episodes under LoRA r=8, and its peak memory on a GPU."""
    import torch

    from agentrl_cli.models.device import pick_dtype
    from benchmarks.rollout import make_model
    from benchmarks.train_step import Ours, make_episodes

    where = torch.device(device)
    from peft import LoraConfig, get_peft_model

    made: Any = make_model(model, device).to(pick_dtype("auto", where))
    made = get_peft_model(
        made, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    learner = Ours(made, make_episodes("tools", 8 if quick else 64, made.config.vocab_size))
    times = []
    for _ in range(2 if quick else 4):
        started = time.perf_counter()
        learner.step()
        if where.type == "cuda":
            torch.cuda.synchronize()
        times.append(round(time.perf_counter() - started, 3))
    peak = torch.cuda.max_memory_allocated(where) if where.type == "cuda" else None
    return {"model": model, "seconds": times, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=("3M", "60M", "0.5B"), default="0.5B")
    parser.add_argument(
        "--quick", action="store_true", help="few episodes, one round: checks the script"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--update", action="store_true", help="only the update, in this process")
    given = parser.parse_args()
    if given.update:
        print(json.dumps(update(given.device, given.model, given.quick)))
        return
    from agentrl_cli.trainer.metrics import machine

    report: dict[str, Any] = {
        "machine": machine(given.device),
        "device": given.device,
        "model": given.model,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, command in parts(given.device, given.model, given.quick, Path(folder)).items():
            print(f"{name} …", file=sys.stderr, flush=True)
            report[name] = run(command, Path(folder))
            given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"Wrote {given.out}.", file=sys.stderr)


if __name__ == "__main__":
    main()
