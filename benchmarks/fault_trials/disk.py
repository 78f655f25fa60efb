"""A file system that fills up: at each of many sizes a rollout, a training and a merge end in one sentence.

The project lies on a tmpfs of that size (root is needed to mount one). Afterwards the tmpfs is made larger, and the
training must go on to the ending of one that was never interrupted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from agentrl_cli.errors import NotFound, StoreError
from agentrl_cli.store import Store
from benchmarks.fault_trials.commands import differences, ending, project_of, run
from tests.helpers.train import write_model


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, default=20)


def trial(args: argparse.Namespace, work: Path) -> tuple[dict[str, Any], bool]:
    """The exit status of each command at each size, and what was wrong."""
    if os.geteuid() != 0:
        raise SystemExit("Mounting a small file system needs root.")
    model = write_model(work / "model")
    whole = project_of(work / "whole", model, "sync")
    code, said = run(whole, "train")
    if code:
        raise SystemExit(said)
    used = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
    want = ending(whole)
    table: dict[str, Any] = {"whole_kib": used, "sizes": {}, "wrong": []}
    for number in range(args.sizes):
        kib = 64 + round(used * 1.2 * (number + 1) / args.sizes)
        table["sizes"][str(kib)] = _at(work / f"disk-{kib}", kib, model, want, table["wrong"])
        print(kib, table["sizes"][str(kib)], flush=True)
    return table, not table["wrong"]


def _at(
    mount: Path, kib: int, model: Path, want: dict[str, Any], wrong: list[str]
) -> dict[str, int]:
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(mount)], check=True)
    try:
        project = project_of(mount / "project", model, "sync")
        codes: dict[str, int] = {}
        for args in (("train",), ("rollout", "-n", "2"), ("merge", "last", "out")):
            codes[args[0]], said = run(project, *args)
            sentence = (
                "Traceback" not in said
                and "Something went wrong" not in said
                and "callback" not in said
            )
            if not sentence or codes[args[0]] not in (0, 2, 3):
                wrong.append(f"{kib} KiB, {args[0]}: exit {codes[args[0]]}: {said[-400:]}")
        subprocess.run(["mount", "-o", "remount,size=256m", str(mount)], check=True)
        codes["afterwards"], said = run(project, "train", *_resume(project))
        bad = (
            differences("sync", ending(project), want)
            if codes["afterwards"] == 0
            else [said[-400:]]
        )
        wrong += [f"{kib} KiB, afterwards: {text}" for text in bad]
        return codes
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def _resume(project: Path) -> tuple[str, ...]:
    db = project / "runs" / "agentrl.db"
    try:
        with Store.open(db, readonly=True) as store:
            return (
                ("--resume", "last") if any(row.kind == "train" for row in store.runs.all()) else ()
            )
    except (NotFound, StoreError):  # the disk was full before the store was made
        return ()
