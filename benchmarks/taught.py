"""Does `agentrl why EPISODE@t2.0` name the groups that taught a token? Planted behaviours, and trainings without them.

    python benchmarks/taught.py [--trials 10] [--first 0] [--work DIR] [--write]

Each trial is a real training of the bundled model on code-task: 5 steps of 4 groups. Five groups are questions at
which the base calls its tool in 2 to 6 of 8 attempts, the first ones in an order drawn by the seed; only attempts
that begin with a call are paid there (odd trials: only those that answer at once). In the other fifteen a function
is to be written, which the base begins alike in nearly all attempts, and the attempt's seed decides between 0 and
0.5: they train as much, and not how a question is begun. (Noise in questions of the same kind would: Adam makes
steps of one size, and the training without the planted groups would follow the noise as far.) Advantages are not
divided by their deviation. The command names five groups for the first token of the assistant; the same training
without them (`algo.skip.groups`) must undo at least half of the change of its probability.
Writes benchmarks/results/taught.json, and with --write a table between the `taught` markers of the
README. With --work the projects are kept, and a trial whose training is there is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.plugins.taught.trace import token_segment, trace  # noqa: E402
from agentrl_cli.plugins.taught.weights import RunWeights  # noqa: E402
from agentrl_cli.store import Store  # noqa: E402
from benchmarks.learning import machine  # noqa: E402

README = ROOT / "benchmarks" / "README.md"
MARKS = ("<!-- taught:start -->", "<!-- taught:end -->")
PLANTED, STEPS, PROMPTS, NAMED = 5, 5, 4, 5
PROBED, ATTEMPTS = 60, 8
"""Tasks and attempts of the base's rollout."""
SETS = ("rollout.max_turns=1", "rollout.max_new_tokens=48", f"rollout.prompts_per_step={PROMPTS}", "train.eval=0",
        "train.schedule.warmup_steps=0", "train.save=100", "algo.advantage=dr_grpo")  # fmt: skip
REWARD = """

import zlib

PLANTED, CALLS = {planted!r}, {calls!r}


def tests(episode, ctx):
    if episode.task_id.rpartition("/")[2] in PLANTED:
        return float((episode.tool_calls > 0) == CALLS)
    return 0.5 * (zlib.crc32(str(episode.seed).encode()) % 2)


REWARDS = {{"tests": tests}}
"""


def agentrl(folder: Path, *words: str) -> None:
    """One command in a folder."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "agentrl_cli", *words]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")


def make(folder: Path, trial: int, rate: float) -> set[str]:
    """A project with planted tasks, and its training."""
    agentrl(folder.parent, "init", "code-task", folder.name, "--yes")
    rng, data = random.Random(trial), folder / "data" / "train.jsonl"
    rows = list(map(json.loads, data.read_text().splitlines()))
    probed = rng.sample([row for row in rows if row["kind"] == "answer"], PROBED)
    write(data, probed)
    mixed = find_mixed(folder, trial)
    planted = [row for row in probed if row["id"] in mixed][:PLANTED]
    functions = [row for row in rows if row["kind"] == "function"]
    write(data, planted + rng.sample(functions, STEPS * PROMPTS - PLANTED))
    task, settings = folder / "task.py", folder / "task.yaml"
    names = sorted(row["id"] for row in planted)
    task.write_text(task.read_text() + REWARD.format(planted=names, calls=trial % 2 == 0))
    text = settings.read_text()
    for part in ("  format: {weight: 0.1}\n", "  tool_errors: {weight: 0.1}\n"):
        text = text.replace(part, "")
    settings.write_text(text)
    train(folder, trial, rate)
    return set(names)


def write(data: Path, rows: list[dict[str, Any]]) -> None:
    """The rows of the training split."""
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def find_mixed(folder: Path, trial: int) -> set[str]:
    """Tasks of which the base calls its tool in some attempts and answers at once in others."""
    sets = [word for one in SETS[:2] for word in ("--set", one)]
    count = ("-n", str(PROBED), "-g", str(ATTEMPTS), "--seed", str(trial))
    agentrl(folder, "rollout", *count, *sets)
    with Store.open(folder / "runs" / "agentrl.db", readonly=True) as store:
        rows = store.episodes.rows(store.episodes.ids("kind:rollout calls:>0", "time"))
    calls = Counter(row.task_id.rpartition("/")[2] for row in rows)
    return {task for task, count in calls.items() if 2 <= count <= ATTEMPTS - 2}


def train(folder: Path, trial: int, rate: float, *more: str) -> None:
    """A training of a project."""
    sets = [word for one in (*SETS, *more) for word in ("--set", one)]
    agentrl(folder, "train", "--steps", str(STEPS), "--seed", str(trial), "--lr", str(rate), *sets)


def measure(folder: Path, trial: int, rate: float, planted: set[str]) -> dict[str, Any]:
    """What the command names for the first token, and what the training without it changes."""
    db = folder / "runs" / "agentrl.db"
    text = "<tool_call>" if trial % 2 == 0 else "Answer"
    with Store.open(db, readonly=True) as store:
        run = store.runs.training("last")
        calls = "calls:>0" if trial % 2 == 0 else "calls:0"
        rows = store.episodes.rows(store.episodes.ids(f"kind:train {calls}", "time", run.id))
        paid = [row for row in rows if row.task_id.rpartition("/")[2] in planted]
        for row in paid:  # one that begins so: a call may follow a text
            episode = store.episodes.get(row.id)
            turn = next(turn for turn in episode.turns if turn.role == "assistant")
            if bool(turn.messages[0].get("content")) == trial % 2:
                break
        place = turn.index, 0
        found = trace(store, run, episode, place, folder)
    named = found.groups[:NAMED]
    train(folder, trial, rate, f"algo.skip.groups=[{','.join(one.group for one in named)}]")
    with Store.open(db, readonly=True) as store:
        other = RunWeights(store, store.runs.training("last"), folder)
        other.put(STEPS)
        without = float(other.logp(token_segment(episode, *place)).detach().exp())
    base, end = found.probabilities[0], found.probabilities[STEPS]
    hits = sum(one.task.rpartition("/")[2] in planted for one in named)
    return {"trial": trial, "token": text, "base": base, "trained": end, "without": without, "named": hits,
            "planted": PLANTED, "groups": len(found.groups), "undone": (end - without) / (end - base)}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a table."""
    lines = ["| trial | first token | base | trained | without the five named | undone | of the five planted groups |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for r in rows:
        numbers = " | ".join(f"{r[name]:.3f}" for name in ("base", "trained", "without"))
        lines.append(
            f"| {r['trial']} | `{r['token']}` | {numbers} | {r['undone']:.0%} | {r['named']} named |"
        )
    good = sum(r["undone"] >= 0.5 for r in rows)
    return "\n".join([*lines, "", f"At least half is undone in {good} of {len(rows)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--write", action="store_true", help="the table into the README")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    out = ROOT / "benchmarks" / "results" / "taught.json"
    with tempfile.TemporaryDirectory() as scratch:
        for trial in range(given.first, given.first + given.trials):
            folder = (given.work or Path(scratch)) / f"trial{trial}"
            rows.append(measure(folder, trial, given.lr, make(folder, trial, given.lr)))
            print(json.dumps(rows[-1]), flush=True)
            out.write_text(
                json.dumps({"machine": machine(), "lr": given.lr, "rows": rows}, indent=1) + "\n"
            )
    print(table(rows))
    if given.write:
        head, _, rest = README.read_text("utf-8").partition(MARKS[0])
        tail = rest.partition(MARKS[1])[2]
        README.write_text(f"{head}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{tail}", "utf-8")


if __name__ == "__main__":
    main()
