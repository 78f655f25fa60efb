"""kill -9 at random moments over every kind of command; resumed or run again, it must end as if never killed."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl_cli.store import Store
from benchmarks.fault_trials.commands import MODES, Command, differences, ending, project_of, run
from benchmarks.fault_trials.lost_workers import kill_workers
from tests.helpers.train import write_model

ONE_SHOT = {
    "sft": (
        "sft",
        "out",
        "--from-store",
        "kind:train",
        "--steps",
        "6",
        "--lr",
        "0.01",
        "--seed",
        "0",
    ),
    "merge": ("merge", "last", "out"),
    "eval": ("eval", "--checkpoint", "last", "-k", "2", "--limit", "6"),
}
"""Commands on a finished training that are not resumed: killed, they are run again from the start."""
WORKERS = ("processes", "ray")
"""Trainings whose workers are killed, not they themselves; ray needs the extra ray."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        choices=[*MODES, *ONE_SHOT, *WORKERS],
        help="One kind of command, killed --kills times.",
    )


def trial(args: argparse.Namespace, work: Path) -> tuple[dict[str, Any], bool]:
    """A row of trials, kills and what was wrong for each kind of command; half of the resumes are killed again."""
    rng = random.Random(args.seed)
    model = write_model(work / "model")
    table: dict[str, Any] = {}
    kinds = [args.only] if args.only else [*MODES, *ONE_SHOT, *WORKERS]
    share = -(-args.kills // len(kinds))
    for kind in kinds:
        if kind in MODES:
            table[kind] = _kill_trainings(rng, work / kind, model, kind, share)
        elif kind in WORKERS:
            table[kind] = kill_workers(rng, work / kind, model, kind, share)
        else:
            table[kind] = _kill_commands(
                rng, _trained(work, model), work / kind, ONE_SHOT[kind], share
            )
        print(kind, json.dumps(table[kind]), flush=True)
    return table, not any(row["wrong"] for row in table.values())


def _trained(work: Path, model: Path) -> Path:
    """A project with a finished training."""
    project = work / "trained"
    if not project.is_dir():
        code, said = run(project_of(project, model, "sync"), "train")
        if code:
            raise SystemExit(said)
    return project


def _kill_trainings(
    rng: random.Random, work: Path, model: Path, mode: str, kills: int
) -> dict[str, Any]:
    for name in (
        "first",
        "whole",
    ):  # the second is timed: the first waits for the server that has imported torch
        whole = project_of(work / name, model, mode)
        began = time.monotonic()
        code, said = run(whole, "train")
        if code:
            raise SystemExit(said)
    seconds, want = time.monotonic() - began, ending(whole)
    count, trial, wrong = 0, 0, []
    while count < kills:
        trial += 1
        project = project_of(work / f"trial-{trial}", model, mode)
        args: tuple[str, ...] = ("train",)
        while len(args) == 1 or rng.random() < 0.5:
            alive = Command(project, *args).kill(rng.uniform(0.0, seconds))
            count += alive
            with Store.open(project / "runs" / "agentrl.db") as store:
                begun = any(row.kind == "train" for row in store.runs.all())
            args = ("train", "--resume", "last") if begun else ("train",)
            if not alive:
                break
        code, said = run(project, *args)
        bad = [f"exit {code}: {said[-300:]}"] if code else differences(mode, ending(project), want)
        wrong += [f"trial {trial}: {text}" for text in bad]
        shutil.rmtree(project)
    return {"trials": trial, "kills": count, "wrong": wrong}


def _kill_commands(
    rng: random.Random, trained: Path, work: Path, command: tuple[str, ...], kills: int
) -> dict[str, Any]:
    def fresh(name: str) -> Path:
        shutil.copytree(trained, work / name)
        return work / name

    for name in ("first", "whole"):
        whole = fresh(name)
        began = time.monotonic()
        code, said = run(whole, *command)
        if code:
            raise SystemExit(said)
    seconds, want = time.monotonic() - began, _products(whole)
    count, trial, wrong = 0, 0, []
    while count < kills:
        trial += 1
        project = fresh(f"trial-{trial}")
        alive = Command(project, *command).kill(rng.uniform(0.0, seconds))
        count += alive
        if (
            alive
            and (project / "out" / "model.safetensors").is_file()
            and _products(project)["out"] != want["out"]
        ):
            wrong.append(
                f"trial {trial}: a killed command left an output that looks whole and is not"
            )
        # A finished half of an evaluation is used again only on request.
        again = (*command, "--resume" if command[0] == "eval" else "--force")
        code, said = run(project, *again)
        if code or (alive and _products(project) != want):
            wrong.append(f"trial {trial}: exit {code}, {said[-300:]}")
        shutil.rmtree(project)
    return {"trials": trial, "kills": count, "wrong": wrong}


def _products(project: Path) -> dict[str, Any]:
    """Outputs by checksum, and the evaluations with the number of their episodes."""
    out = sorted((project / "out").glob("*.safetensors")) if (project / "out").is_dir() else []
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        evals = [
            row
            for run_id in (None, *(r.id for r in store.runs.all()))
            for row in store.runs.evals(run_id)
        ]
        episodes = Counter(one.kind for one in store.episodes.rows(store.episodes.ids("", "time")))
    return {
        "out": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out},
        "evals": sorted((row.name, row.split, row.pass_rate) for row in evals),
        "episodes": episodes["eval"],
    }
