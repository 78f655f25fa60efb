"""A training whose GPU failed resumes in a new process: CUDA repeats some errors until the process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl_cli.errors import device_fault
from agentrl_cli.paths import PROJECT_FILE
from agentrl_cli.store import Store

EVENT = "restarted"
"""The event of a run; its data has the step at which the GPU failed."""


@contextmanager
def restart_after_gpu_fault(
    project: Path,
    db: Path,
    begun: Sequence[str],
    *,
    as_json: bool,
    narrate: Callable[[str], None],
) -> Iterator[None]:
    """Replace this process by one that resumes the training in the block, if a GPU fault ends it.

    Not if the training got no further than at its last restart. `begun`: the run's id, once there is one.
    """
    try:
        yield
    except Exception as error:
        fault = device_fault(error)
        if not fault or not begun or not _gets_on(db, begun[0], fault, narrate):
            raise
        sys.stdout.flush()
        words = ["--resume", begun[0], "--db", str(db)] + ["--json"] * as_json
        words += ["--project", str(project)] if (project / PROJECT_FILE).is_file() else []
        os.chdir(project)  # where a resume looks for the files of a run without agentrl.yaml
        os.execv(sys.executable, [sys.executable, "-m", "agentrl_cli", "train", *words])


def _gets_on(db: Path, run_id: str, fault: str, narrate: Callable[[str], None]) -> bool:
    """Whether the run did a step since its last restart; notes this one."""
    with Store.open(db) as store:
        run = store.runs.get(run_id)
        events = [e["data"] for e in store.journal.events(run_id) if e["kind"] == EVENT]
        if events and run.step <= events[-1]["step"]:
            narrate(
                f"{run.name}: the GPU failed again before step {run.step + 1} was done; not started again"
            )
            return False
        store.journal.add_event(run_id, EVENT, {"step": run.step, "error": fault})
    narrate(
        f"{run.name}: the GPU failed ({fault}); a new process resumes the run from its last checkpoint"
    )
    return True
