"""A training whose GPU failed resumes in a new process: CUDA repeats some errors until the process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentrl_cli.commands.common import Context, narrate
from agentrl_cli.errors import device_fault
from agentrl_cli.paths import PROJECT_FILE

EVENT = "restarted"
"""The event of a run; its data has the step at which the GPU failed."""


@contextmanager
def restarting(context: Context, begun: Sequence[str], *, as_json: bool) -> Iterator[None]:
    """Around a training: if a GPU fault ends it, this process is replaced by one that resumes it.

    Not if the training got no further than at its last restart. `begun`: the run's id, once there is one.
    """
    try:
        yield
    except Exception as error:
        fault = device_fault(error)
        if not fault or not begun or not _gets_on(context, begun[0], fault):
            raise
        sys.stdout.flush()
        words = ["--resume", begun[0], "--db", str(context.db)] + ["--json"] * as_json
        words += ["--project", str(context.project)] if is_project(context) else []
        os.chdir(
            context.project
        )  # where a resume looks for the files of a run without agentrl.yaml
        os.execv(sys.executable, [sys.executable, "-m", "agentrl_cli", "train", *words])


def is_project(context: Context) -> bool:
    """Whether the command runs in a project, and not in some folder."""
    return (context.project / PROJECT_FILE).is_file()


def _gets_on(context: Context, run_id: str, fault: str) -> bool:
    """Whether the run did a step since its last restart; notes this one."""
    from agentrl_cli.store import Store

    with Store.open(context.db) as store:
        run = store.runs.get(run_id)
        before = [
            event["data"]["step"]
            for event in store.journal.events(run_id)
            if event["kind"] == EVENT
        ]
        if before and run.step <= before[-1]:
            narrate(
                f"{run.name}: the GPU failed again before step {run.step + 1} was done; not started again"
            )
            return False
        store.journal.add_event(run_id, EVENT, {"step": run.step, "error": fault})
    narrate(
        f"{run.name}: the GPU failed ({fault}); a new process resumes the run from its last checkpoint"
    )
    return True
