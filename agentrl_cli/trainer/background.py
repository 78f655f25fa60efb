"""A training in a process of its own, which outlives the one that starts it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl_cli.errors import NotFound, RunFailed, StoreError
from agentrl_cli.store import RunRow, Store


def start_training(arguments: Sequence[str], db: Path, wanted: str, log: Path) -> RunRow:
    """Start the command line in a new session; returns its run once that process holds it.

    `wanted`: the run's name or id. Raises RunFailed, with the end of the log, if the process ends before.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrl_cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return wait_for_run(process, wanted, db, log)


def wait_for_run(process: subprocess.Popen[bytes], wanted: str, db: Path, log: Path) -> RunRow:
    """Return the run once the new process holds it. Raises RunFailed, with the end of its log, if it ends before."""
    began = time.time()
    while True:
        try:
            with Store.open(db, readonly=True) as store:
                row = store.runs.get(wanted)
            if row.pid == process.pid and (row.alive or row.ended >= began):
                return row
        except (NotFound, StoreError):
            pass  # missing or still being created; a lasting fault also ends the new process
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-6:])
            raise RunFailed(f"The training did not start:\n{tail}", hint=f"Its log: {log}")
        time.sleep(0.1)
