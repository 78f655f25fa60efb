"""This checkout's sampling engine beside an older one: CPU seconds of the same work, in interleaved rounds.

    git worktree add --detach /tmp/old COMMIT
    python benchmarks/engines.py /tmp/old [--cases generate-3M …] [--rounds 5] [--out FILE]

Each case runs in one process per checkout, with this Python and one thread. The two processes take turns: a round is a
measurement in each, and which goes first alternates; the first round warms up and is not counted. The figure of a round
is old CPU seconds / new CPU seconds, so more than 1 means that this checkout is cheaper; of all rounds the median, the
least and the most are kept. Peak memory (VmHWM) is read when all rounds are over.

`decode`: one policy that stays; 64, 8 and 1 rows in groups of at most 8, prompts of 128 tokens, 48 new ones; CPU
milliseconds a step. `generate`: rollout.py's, 64 prompts.
`tools`: rollout_tools.py's three-turn tool episodes, store included. `step`:
those and an update, as in whole_step.py; its parts are measured apart too. `demo`: `agentrl train` of code-task for 40
steps, with its sandbox and start, on this checkout's rows; what the two sample is not the same to the last token, so
CPU seconds per 1,000 sampled tokens stand beside.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: the checkout that is measured comes first

from benchmarks.worker import Numbers, Worker, serve  # noqa: E402

CASES = [
    "decode-3M",
    "decode-60M",
    "generate-3M",
    "generate-60M",
    "tools-3M",
    "tools-60M",
    "step-3M",
    "step-60M",
    "demo",
]
EPISODES = {"3M": 64, "60M": 16}
"""Of the tool episodes and whole steps; `generate` always has 64."""
STEPS = 40


# --- in a process of one checkout -----------------------------------------------------------------------------------


def decode(model_name: str) -> Callable[[], Numbers]:
    """Turns of 64, 8 and 1 rows by one policy."""
    bench = importlib.import_module("benchmarks.rollout")
    policies = importlib.import_module("agentrl_cli.inference.policy")
    types = importlib.import_module("agentrl_cli.types")
    model = bench.make_model(model_name)
    policy = policies.LocalPolicy(model, context_length=4096, rows=64)
    seeds = itertools.count()

    async def turn(rows: int) -> None:
        policy.set_version(f"{next(seeds)}")
        prompts, _ = bench.work(model.config.vocab_size, rows, next(seeds), min(rows, 8))
        jobs = [
            (n, ids, types.Sampling(max_new_tokens=48, seed=n)) for n, ids in enumerate(prompts)
        ]
        await asyncio.gather(*(policy.generate(f"e{n}", ids, how) for n, ids, how in jobs))
        for n, *_ in jobs:
            await policy.release(f"e{n}")

    def run() -> Numbers:
        found = {}
        for rows in (64, 8, 1):
            started = time.process_time()
            asyncio.run(turn(rows))
            found[f"{rows} rows"] = (time.process_time() - started) / 48 * 1000
        return found

    return run


def generate(model_name: str) -> Callable[[], Numbers]:
    """Rollouts of 64 prompts, a new policy each."""
    bench = importlib.import_module("benchmarks.rollout")
    model = bench.make_model(model_name)
    prompts, wanted = bench.work(model.config.vocab_size, 64)

    def run() -> Numbers:
        started = time.process_time()
        bench.ours(model, prompts, wanted)
        return {"cpu": time.process_time() - started}

    return run


def episodes(model_name: str) -> tuple[Any, list[str], list[Any]]:
    """(chat, prompts, the scripted turns) of scripted tool episodes, the same for every checkout."""
    tools, paths = (
        importlib.import_module("benchmarks.rollout_tools"),
        importlib.import_module("agentrl_cli.paths"),
    )
    count = EPISODES[model_name]
    tokenizer = importlib.import_module("agentrl_cli.chat.tokenizer").Tokenizer.load(
        paths.bundled_model()
    )
    prompts = [f"Task {n // 8}: add {n // 8 + 11} and 7, then add 5." for n in range(count)]
    chat = importlib.import_module("agentrl_cli.chat.render").Chat(tokenizer)
    return chat, prompts, tools.script(tokenizer, count)


def tools(model_name: str) -> Callable[[], Numbers]:
    """One rollout of tool episodes into a new store."""
    bench = importlib.import_module("benchmarks.rollout_tools")
    chat, prompts, turns = episodes(model_name)
    model = bench.make_model(model_name, eos_token_id=chat.tokenizer.eos_ids[0])
    return lambda: {"cpu": bench.ours(model, chat, prompts, turns)["cpu"]}


def step(model_name: str) -> Callable[[], Numbers]:
    """One step of tool episodes: rollout, update and the weights' way back."""
    bench = importlib.import_module("benchmarks.whole_step")
    chat, prompts, turns = episodes(model_name)
    ours = bench.Ours(
        bench.make_model(model_name, True), chat, prompts, turns, Path(tempfile.mkdtemp())
    )

    def run() -> Numbers:
        cpu = ours.step()
        return {"cpu": cpu, **ours.parts[-1]}

    return run


def demo(_model_name: str) -> Callable[[], Numbers]:
    """`agentrl train` in a new project."""

    def run() -> Numbers:
        with tempfile.TemporaryDirectory() as folder:
            agentrl = [sys.executable, "-m", "agentrl_cli"]
            quiet: dict[str, Any] = {"cwd": folder, "capture_output": True}
            subprocess.run([*agentrl, "init", "code-task", "demo"], check=True, **quiet)
            for path in (ROOT / "tasks" / "code-task" / "data").glob("*.jsonl"):
                shutil.copy(path, Path(folder, "demo", "data"))
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            settings = ["--set", f"train.steps={STEPS}", "--set", "train.eval.every=0"]
            subprocess.run([*agentrl, "train", "--project", "demo", *settings], check=True, **quiet)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            found = next(Path(folder).rglob("agentrl.db"))
            with sqlite3.connect(found) as store:
                sampled = store.execute("SELECT SUM(n_model_tokens) FROM episodes").fetchone()[0]
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"cpu": cpu, "per_1000": 1000 * cpu / sampled, "memory": after.ru_maxrss / 1024}

    return run


def work(case: str) -> None:
    """Measure once for each line that is read, and print it as JSON; at the end of the input the peak memory."""
    name, _, model = case.partition("-")
    makers: dict[str, Callable[[str], Callable[[], Numbers]]]
    makers = {"decode": decode, "generate": generate, "tools": tools, "step": step, "demo": demo}
    if name != "demo":
        importlib.import_module("torch").set_num_threads(1)
        importlib.import_module("logging").disable(30)
    serve(makers[name](model), peak_memory)


def peak_memory() -> Numbers:
    """MiB of this process at most."""
    status = Path("/proc/self/status").read_text()
    return {
        "memory": int(
            next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        )
        / 1024
    }


# --- in the process that compares -------------------------------------------------------------------------------------


def worker(checkout: Path, case: str) -> Worker:
    """A process of one checkout that measures one case."""
    # The checkout comes before this script's own folder and before what is installed.
    env = {"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}"}
    return Worker([sys.executable, str(Path(__file__).resolve()), "--work", case], env, checkout)


def compared(old: Path, case: str, rounds: int) -> dict[str, Any]:
    """Interleaved rounds of one case."""
    both = {"old": worker(old, case), "new": worker(ROOT, case)}
    names = list(both)
    found: dict[str, list[Numbers]] = {name: [] for name in names}
    warm = int(case != "demo")
    for n in range(rounds + warm):
        for name in names if n % 2 else names[::-1]:
            numbers = both[name].measure()
            if n >= warm:
                found[name].append(numbers)
    memory = {name: worker.close() for name, worker in both.items()}
    if case == "demo":
        memory = {
            name: {"memory": max(one.pop("memory") for one in every)}
            for name, every in found.items()
        }
    row: dict[str, Any] = {"case": case, "rounds": rounds}
    for key in found["new"][0]:
        ratios = [a[key] / b[key] for a, b in zip(found["old"], found["new"], strict=True)]
        row[key] = {name: [round(one[key], 3) for one in every] for name, every in found.items()}
        row[key]["old / new"] = [
            round(figure, 3) for figure in (median(ratios), min(ratios), max(ratios))
        ]
    row["memory"] = {name: round(one["memory"]) for name, one in memory.items()}
    row["load"] = os.getloadavg()[0]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "old", type=Path, nargs="?", help="a checkout of the commit to compare with"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "engines.json"
    )
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    if given.old is None:
        parser.error("give a checkout of the commit to compare with")
    kept = json.loads(given.out.read_text()) if given.out.is_file() else []
    for case in given.cases:
        row = compared(given.old.resolve(), case, given.rounds)
        kept = [other for other in kept if other["case"] != case] + [row]
        given.out.write_text(json.dumps(kept, indent=1) + "\n")
        parts = [
            f"{key} {row[key]['old / new']}"
            for key in row
            if isinstance(row[key], dict) and key != "memory"
        ]
        print(
            f"{case}: old / new (median, least, most): {'; '.join(parts)}; MiB {row['memory']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
