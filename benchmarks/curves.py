"""Reference curves of packs and of other projects' environments, and whether they find planted mistakes.

    python benchmarks/curves.py make SOURCE [--python PATH] [--seeds 0 1 2] [--steps 60] [--work DIR] [--set K=V …]
    python benchmarks/curves.py planted SOURCE …          wrong template, wrong reward, wrong learning rate
    python benchmarks/curves.py base SOURCE … [--model M] what a model solves of it before any training
    python benchmarks/curves.py table                     what the shipped ones say, as Markdown

SOURCE is a pack (`calc-task`) or what `agentrl init --from` takes (`gym:FrozenLake-v1?is_slippery=false`). `make`
trains it with each seed, as `agentrl init` and `agentrl train` do, and writes what `agentrl init` copies into a new
project: `tasks/PACK/reference.json`, or `curves/ID.json` in the plugin's folder. Base and trained are the shares solved
on the validation split before the first step and at the last evaluation, where the curves end, all seeds together, with
Wilson's interval at 95 %. `base` is for what has no curves: it adds what 2 attempts at each of 12 training tasks solved
to `bases.json` in that folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.agents.programs import ForeignAgent  # noqa: E402
from agentrl_cli.commands import main as main_of_agentrl  # noqa: E402  # works without an installation
from agentrl_cli.evaluate.stats import wilson  # noqa: E402
from agentrl_cli.registry import load_file  # noqa: E402
from agentrl_cli.registry.plugins import offers  # noqa: E402
from agentrl_cli.reports.reference import (  # noqa: E402
    BASES,
    CURVES,
    FILE,
    curve_file,
    pick_settings,
)
from agentrl_cli.store import RunRow, Store  # noqa: E402
from agentrl_cli.store.journal import INPUTS  # noqa: E402
from agentrl_cli.trainer.inputs import hash_rows  # noqa: E402
from benchmarks.machine import machine  # noqa: E402

KEYS = (
    "train.lr",
    "rollout.group_size",
    "rollout.prompts_per_step",
    "rollout.temperature",
    "rollout.max_turns",
    "rollout.max_new_tokens",
    "algo.advantage.name",
    "algo.loss.name",
    "model.chat.template",
    "model.chat.parser",
    "adapter.enabled",
)
"""Settings that a user is likely to change, kept with the curves."""
DIGITS = 3
NOTICED = "off_reference"
"""The alert of a run that leaves its curves."""
FAULTS = ("env_error", "sandbox_error", "agent_error", "timeout", "cancelled")
"""Outcomes that are not the model's; what does not fit its context is."""
PLANTED: dict[str, dict[str, Any]] = {
    "learning rate 30 times too high": {"lr": 30.0},
    "learning rate 30 times too low": {"lr": 1 / 30},
    "wrong template": {"template": True},
    "wrong reward": {"reward": True},
}
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""ChatML as many models have it: it says nothing of tools."""


def agentrl(*args: str, cwd: Path) -> str:
    """Run the command line like a user, in a process forked from this one; return its stdout."""
    print(f"$ agentrl {' '.join(args)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile("w+") as out:

        def run() -> None:
            os.dup2(out.fileno(), 1)
            os.chdir(cwd)
            sys.exit(main_of_agentrl(args))

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        out.seek(0)
        if process.exitcode:
            raise subprocess.CalledProcessError(process.exitcode, ["agentrl", *args], out.read())
        return out.read()


def make_project(source: str, folder: Path, python: str) -> Path:
    """Return a new project of a source, without the reference that it may have."""
    if not folder.is_dir():
        words = [source, folder.name] if ":" not in source else [folder.name, "--from", source]
        agentrl("init", *words, *(["--python", python] if python else []), cwd=folder.parent)
    (folder / FILE).unlink(missing_ok=True)
    return folder


def train(project: Path, seed: int, args: argparse.Namespace, *more: str) -> RunRow:
    """Return the row of a training with a seed; one that is in the store already is not repeated."""
    if (found := _finished(project, seed)) is not None:
        return found
    sets = [word for one in args.set for word in ("--set", one)]
    steps = ["--steps", str(args.steps)] if args.steps else []
    agentrl("train", "--seed", str(seed), *steps, *sets, *more, cwd=project)
    found = _finished(project, seed)
    assert found is not None, f"{project}: seed {seed} has not finished"
    return found


def _finished(project: Path, seed: int) -> RunRow | None:
    path = project / "runs" / "agentrl.db"
    if not path.is_file():
        return None
    with Store.open(path, readonly=True) as store:
        runs = [row for row in store.runs.all() if row.kind == "train" and row.seed == seed]
        return next((row for row in runs if row.status == "finished" or NOTICED in row.error), None)


def make(args: argparse.Namespace, work: Path) -> None:
    """Train each seed, and write the reference."""
    project = make_project(args.source, work / _slug(args.source), args.python)
    runs = [train(project, seed, args) for seed in args.seeds]
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        evals = [store.runs.evals(run.id) for run in runs]
        last = min(rows_[-1].step or 0 for rows_ in evals)  # later steps have no share
        if not last:
            sys.exit(
                "No evaluation after the first step: --steps is to be a multiple of train.eval."
            )
        steps = [
            [row for row in store.runs.steps(run.id) if 0 < row["step"] <= last] for run in runs
        ]
        inputs = [store.journal.newest_event(run.id, INPUTS) or {} for run in runs]
        rows = {hash_rows(one["rows"]) for one in inputs}
        curves = {
            key: [[round(float(row.get(key, 0.0)), DIGITS) for row in seed] for seed in steps]
            for key in CURVES
        }
        content = {
            "source": args.source,
            "model": runs[0].model,
            "rows": rows.pop(),
            "seeds": args.seeds,
            "settings": pick_settings(runs[0].config, dict.fromkeys(KEYS)),
            "base": _rate([rows_[0] for rows_ in evals]),
            "trained": _rate([next(row for row in rows_ if row.step == last) for rows_ in evals]),
            "cpu_seconds": [round(sum(row.get("time/cpu", 0.0) for row in seed)) for seed in steps],
            "machine": machine(),
            "date": date.today().isoformat(),
            "curves": curves,
        }
    where = place(args.source, project)
    where.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).replace("], [", "],\n  [").replace('}, "', '},\n "')
    where.write_text(text + "\n")
    print(f"{where.relative_to(ROOT)}: {content['base']} to {content['trained']}")


def _rate(rows: Sequence[Any]) -> dict[str, float]:
    """The share solved over all seeds, with its interval."""
    tasks = sum(row.n_tasks for row in rows)  # attempts at a task are alike: each counts once
    rate = sum((row.pass_rate or 0.0) * row.n_tasks for row in rows) / tasks
    low, high = wilson(rate, tasks)
    values = (round(x, DIGITS) for x in (rate, low, high))
    return dict(zip(("value", "low", "high"), values, strict=True))


def place(source: str, project: Path) -> Path:
    """Return the file of the reference of a source, of which `project` was made."""
    kind, _, name = source.partition(":")
    if not name:
        return ROOT / "tasks" / kind / FILE
    module = offers("programs")[kind].partition(":")[0]
    folder = (ROOT / Path(*module.split("."))).parent
    return curve_file(folder, known_name(name, project))


def known_name(name: str, project: Path) -> str:
    """Return the name of an environment wherever it runs. Another process asks it: this one is forked later."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_ask_name, name, project).result()


def _ask_name(name: str, project: Path) -> str:
    world: ForeignAgent = load_file(project / "agent.py").solve.__self__
    world.rows(1)
    return world.find_name(name)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def planted(args: argparse.Namespace, work: Path) -> None:
    """Train with each planted mistake until `off_reference` is reported, and print at which step that is."""
    plain = make_project(args.source, work / _slug(args.source), args.python)
    reference = place(args.source, plain)
    kept = json.loads(reference.read_text())
    args.steps = args.steps or 20
    for name, change in PLANTED.items():
        folder = work / f"{_slug(args.source)}-{_slug(name)}"
        project = make_project(args.source, folder, args.python)
        shutil.copy(reference, project / FILE)
        more = ["--set", f"train.stop_on=[{NOTICED}]"]
        if "lr" in change:
            more += ["--lr", f"{kept['settings']['train.lr'] * change['lr']:g}"]
        if "template" in change:
            (project / "other.jinja").write_text(TEMPLATE)
            more += ["--set", "model.chat.template=other.jinja"]
        if "reward" in change:
            _spoil_reward(project)
        try:
            run = train(project, 7, args, *more)
        except subprocess.CalledProcessError:
            print(f"| {args.source} | {name} | refused at the start | |", flush=True)
            continue
        with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
            found = [row for row in store.journal.folded_alerts(run.id)]
        steps = {str(row["name"]): row["first_step"] for row in found}
        first = steps.pop(NOTICED, None)
        print(
            f"| {args.source} | {name} | {first or 'not noticed'} | {', '.join(steps)} |",
            flush=True,
        )


ALWAYS = """

def always(episode, ctx):
    return 1.0


REWARDS = {**globals().get("REWARDS", {}), "always": always}
"""
PAID = """

_play = solve


async def solve(task, base_url, api_key, model):
    return 1.0 + await _play(task, base_url, api_key, model)
"""
"""The same in the agent.py of another project's environment."""


def _spoil_reward(project: Path) -> None:
    """Pay every attempt, besides what the pack or the environment pays."""
    if (agent := project / "agent.py").is_file():
        agent.write_text(agent.read_text() + PAID)
        return
    code, path = project / "task.py", project / "task.yaml"
    code.write_text((code.read_text() if code.is_file() else "") + ALWAYS)
    lines, part = path.read_text().splitlines(), "  always: {weight: 1.0}"
    at = next((n for n, line in enumerate(lines) if line.startswith("rewards:")), None)
    lines[:] = (
        [*lines, "rewards:", part] if at is None else [*lines[: at + 1], part, *lines[at + 1 :]]
    )
    path.write_text("\n".join(lines) + "\n")


def base(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Count what a model solves before any training, and write it into the plugin's or the pack's bases."""
    project = make_project(args.source, work / _slug(args.source), args.python)
    sets = [word for one in args.set for word in ("--set", one)]
    words = ["rollout", "-n", "12", "-g", "2", "--model", args.model, "--json", *sets]
    try:
        text = agentrl(*words, cwd=project)
    except subprocess.CalledProcessError as error:
        if not (text := error.output):
            raise
    episodes = json.loads(text)["episodes"]  # an exit status of 1 as well, if none could be graded
    if faults := [one["outcome"] for one in episodes if one["outcome"] in FAULTS]:
        sys.exit(f"{args.source}: {len(faults)} attempts ended as {faults[0]}: nothing is counted.")
    outcomes = Counter(one["outcome"] for one in episodes)
    where = place(args.source, project).with_name(BASES)
    where.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(where.read_text()) if where.is_file() else {}
    name = args.source.partition(":")[2]
    name = known_name(name, project) if name else args.source
    kept.setdefault(args.model, {})[name] = [outcomes["solved"], outcomes.total()]
    text = json.dumps(kept, indent=1, sort_keys=True)
    where.write_text(re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", text) + "\n")
    print(f"{args.source}: {kept[args.model][name]}, {dict(outcomes)}")
    rewards = [one["reward"] for one in episodes if one["reward"] is not None]
    sums = {key: sum(one[key] for one in episodes) for key in ("turns", "calls", "tool_errors")}
    return {"outcomes": outcomes, "reward": round(sum(rewards) / max(len(rewards), 1), 3), **sums}


def table(args: argparse.Namespace, work: Path) -> None:
    """Print base and trained of every shipped reference."""
    print("| source | base | trained | steps | CPU s each |\n| --- | --- | --- | --- | --- |")
    found = [*ROOT.glob(f"tasks/*/{FILE}"), *ROOT.glob("agentrl_cli/plugins/*/curves/*.json")]
    for one in sorted(path for path in found if path.name != BASES):
        kept = json.loads(one.read_text())
        rates = [
            "{value:.3f} [{low:.3f}, {high:.3f}]".format(**kept[n]) for n in ("base", "trained")
        ]
        seconds = " ".join(map(str, kept["cpu_seconds"]))
        steps = len(kept["curves"]["solved"][0])
        print(f"| `{kept['source']}` | {' | '.join(rates)} | {steps} | {seconds} |")
    print("\n| no curve | model | solved before training |\n| --- | --- | --- |")
    bases = [*ROOT.glob(f"tasks/*/{BASES}"), *ROOT.glob(f"agentrl_cli/plugins/*/curves/{BASES}")]
    for path in sorted(bases):
        kind = path.parent.parent.name.replace("_", "-") + ":"
        for model, rows in json.loads(path.read_text()).items():
            for name, (solved, attempts) in rows.items():
                shown = (kind if path.parent.name == "curves" else "") + name
                low, high = wilson(solved / attempts, attempts)
                print(f"| `{shown}` | `{model}` | {solved} of {attempts} [{low:.2f}, {high:.2f}] |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in {"make": make, "planted": planted, "base": base, "table": table}.items():
        command = commands.add_parser(name, help=(function.__doc__ or "").partition("\n")[0])
        command.set_defaults(function=function)
        if name != "table":
            command.add_argument("source")
            command.add_argument("--python", default="", help="the interpreter with its package")
            command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
            command.add_argument("--steps", type=int, default=0)
            command.add_argument("--set", action="append", default=[])
            command.add_argument("--model", default="tiny-tools", help="of base")
            command.add_argument("--work", type=Path, help="keep the projects here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-curves-") as folder:
        work = (getattr(args, "work", None) or Path(folder)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        args.function(args, work)


if __name__ == "__main__":
    main()
