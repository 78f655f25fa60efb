"""A training that is resumed, by a user or after a GPU fault, or started in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config, Sources, load_config
from agentrl_cli.config.models import fixed_sections
from agentrl_cli.errors import ConfigError, NotFound, RunFailed, StoreError, device_fault
from agentrl_cli.paths import PROJECT_FILE
from agentrl_cli.rollout.greedy import SUFFIX
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.new_run import keep_settings
from agentrl_cli.store.runs import in_use

RESTARTED = "restarted"
"""The event of a run; its data has the step at which the GPU failed."""
FIXED = ("model", "adapter", "task", "seed", "deterministic", "train.optimizer")
"""Settings that a resume cannot change, besides the sections of plugins that say so. A checkpoint holds the optimizer
with its options, which would override others."""
PACE = {"concurrency", "memory", "cuda_graphs", "timeout"}
"""Settings under `rollout` on which no weights depend."""


@contextlib.contextmanager
def hold_training(db: Path, name: str | None, *, here: bool) -> Iterator[RunRow | None]:
    """Hold the training to resume while the block runs; None for a new one. `last` is the newest.

    It is held from before its settings are read. If it is resumed in another process (not `here`), it is only
    checked. Raises UsageError if another process holds it, NotFound, ConfigError.
    """
    if name is None:
        yield None
        return
    with Store.open(db, readonly=True) as store:
        row = store.runs.training(name)
        store.require_sound()  # before anything relies on it
    if not here:
        if row.held:
            raise in_use(row.name, row.claim, row.holder)
        yield row
        return
    with Store.open(db) as store, store.claims.hold(row.id, "train"):
        yield store.runs.get(row.id)


def resumed_config(
    run: RunRow, base: Path, sets: Sequence[str], flags: Mapping[str, Any]
) -> tuple[Config, Sources]:
    """Return the run's own settings, overridden by environment, --set and flags given now.

    Raises ConfigError if a setting of FIXED would change.
    """
    settings, sources = load_config((), sets, os.environ, flags, base=base, run=run.config)
    before, _ = load_config((), base=base, run=run.config)
    for key in (*FIXED, *fixed_sections()):
        kept, given = (attrgetter(key)(config) for config in (before, settings))
        if kept != given:
            raise ConfigError(
                f"A run cannot be resumed with other settings under `{key}`.",
                hint=f"Start a new run, or restore `{key}`.",
            )
    return settings, sources


def reopen_run(
    store: Store, run_id: str, config: Config, narrate: Callable[[str], None], base: Path
) -> RunRow:
    """Return the row of a training that resumes, with its folder; store its settings, drop old controls."""
    row = store.runs.get(run_id)
    for control in store.controls.take(row.id, "dropped"):
        narrate(f"{control.action} was requested before the run stopped: ignored now.")
    row = store.runs.add_folder(row)
    before, _ = load_config((), base=base, run=row.config)
    with store.transaction():
        if _lessons(before) != _lessons(config):
            _forget_later(store, row, narrate)
        keep_settings(row, config, store)
    return row


def _lessons(config: Config) -> list[Any]:
    """Return the settings by which a step's weights follow from those before it."""
    train = config.train
    sampled = config.rollout.model_dump(exclude=PACE)
    steps = train.steps if train.schedule.name != "constant" else None
    return [
        config.algo,
        sampled,
        config.rewards,
        train.lr,
        train.schedule,
        train.max_grad_norm,
        steps,
    ]


def _forget_later(store: Store, run: RunRow, narrate: Callable[[str], None]) -> None:
    """Let steps after the newest checkpoint be sampled and evaluated again: by other weights than they were."""
    done = max((c.step for c in store.runs.checkpoints(run.id)), default=0)
    groups = [group for group, *_ in store.stats.groups(run.id, done + 1)]
    for group in groups:
        store.marks.retire(run.id, group)
        store.marks.retire(run.id, group + SUFFIX)
    if groups:
        narrate(
            f"other settings than before: steps after {done + 1} are sampled and evaluated again"
        )
    store.marks.retire_evals(run.id, done + 1)


@contextlib.contextmanager
def restart_after_gpu_fault(
    project: Path,
    db: Path,
    begun: Sequence[str],
    *,
    as_json: bool,
    narrate: Callable[[str], None],
) -> Iterator[None]:
    """Replace this process by one that resumes the training in the block, if a GPU fault ends it.

    CUDA repeats some errors until the process ends.
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
        last = store.journal.newest_event(run_id, RESTARTED)
        if last is not None and run.step <= last["step"]:
            narrate(
                f"{run.name}: the GPU failed again before step {run.step + 1} was done; not started again"
            )
            return False
        store.journal.add_event(run_id, RESTARTED, {"step": run.step, "error": fault})
    narrate(
        f"{run.name}: the GPU failed ({fault}); a new process resumes the run from its last checkpoint"
    )
    return True


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
