"""A training that is resumed: the run that is meant, its claim, and the settings that it keeps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config, Sources, load_config
from agentrl_cli.config.models import fixed_sections
from agentrl_cli.errors import ConfigError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.new_run import keep_settings
from agentrl_cli.store.runs import in_use

FIXED = ("model", "adapter", "task", "seed", "deterministic")
"""Settings that a resume cannot change, besides the sections of plugins that say so."""


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
        if getattr(before, key) != getattr(settings, key):
            raise ConfigError(
                f"A run cannot be resumed with other settings under `{key}`.",
                hint=f"Start a new run, or restore `{key}`.",
            )
    return settings, sources


def reopen_run(store: Store, run_id: str, config: Config, narrate: Callable[[str], None]) -> RunRow:
    """Return the row of a training that resumes, with its folder; store its settings, drop old controls."""
    row = store.runs.get(run_id)
    for control in store.controls.take(row.id, "dropped"):
        narrate(f"{control.action} was requested before the run stopped: ignored now.")
    row = store.runs.add_folder(row)
    keep_settings(row, config, store)
    return row
