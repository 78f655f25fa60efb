"""Two supervisors keep one run going: each resumes it, and kills what the other started, at random moments."""

from __future__ import annotations

import argparse
import random
import shutil
import time
from pathlib import Path
from typing import Any

from agentrl_cli.errors import NotFound, StoreError
from agentrl_cli.store import Store
from benchmarks.fault_trials.commands import Command, differences, ending, project_of, run
from tests.helpers.train import write_model


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)


def trial(args: argparse.Namespace, work: Path) -> tuple[dict[str, Any], bool]:
    """Runs that were finished under two supervisors, how often one was refused or killed, and what was wrong."""
    rng = random.Random(args.seed)
    model = write_model(work / "model")
    whole = project_of(work / "whole", model, "sync")
    code, said = run(whole, "train")
    if code:
        raise SystemExit(said)
    want, until = ending(whole), time.monotonic() + 60 * args.minutes
    table: dict[str, Any] = {"runs": 0, "starts": 0, "kills": 0, "refused": 0, "wrong": []}
    while time.monotonic() < until:
        project = project_of(work / f"run-{table['runs']}", model, "sync")
        first = Command(project, "train")
        while first.alive and not _begun(project):
            time.sleep(0.02)
        first.kill(rng.uniform(0.0, 2.0))
        _supervise(project, rng, table)
        bad = differences("sync", ending(project), want)
        table["wrong"] += [f"run {table['runs']}: {text}" for text in bad]
        table["runs"] += 1
        shutil.rmtree(project)
    return table, not table["wrong"]


def _begun(project: Path) -> bool:
    """Whether the store has a run that can be resumed."""
    try:
        with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
            return any(row.kind == "train" for row in store.runs.all())
    except (NotFound, StoreError):  # not made yet
        return False


def _supervise(
    project: Path, rng: random.Random, table: dict[str, Any], patience: float = 300.0
) -> None:
    """Two resumes at a time, 0 to 2 s apart, and one of them killed, until one of them ends the run."""
    ended = time.monotonic() + patience
    while time.monotonic() < ended:
        args = ("train", "--resume", "last")
        first = Command(project, *args)
        time.sleep(rng.choice((0.0, 0.0, 0.3, 1.0, 2.0)))
        both = [first, Command(project, *args)]
        table["starts"] += 2
        if rng.random() < 0.7:
            table["kills"] += rng.choice(both).kill(rng.uniform(0.0, 4.0))
        codes = [command.wait() for command in both]
        for command, code in zip(both, codes, strict=True):
            if "Traceback" in command.output:
                table["wrong"].append(command.output[-500:])
            table["refused"] += code not in (0, -9)
        if 0 in codes:
            return
    table["wrong"].append(f"not finished after {patience} s")
