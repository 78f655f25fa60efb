"""Deleting a run with its folder, and nothing that belongs to another store."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path
from urllib.parse import quote

from agentrl_cli.store import RunRow, Store


def run_folder(db: Path | str, run: RunRow) -> Path | None:
    """The folder that goes with a run: only one right beside the store, and no other store's too (a backup's)."""
    folder, home = Path(run.dir).resolve(), Path(db).resolve().parent
    if not run.dir or not folder.is_dir() or folder.parent != home:
        return None
    others = (file for file in home.glob("*.db") if file.resolve() != Path(db).resolve())
    return None if any(_has_run(file, run.id) for file in others) else folder


def _has_run(file: Path, run_id: str) -> bool:
    """Whether a file is a store that has this run."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as conn:
            return conn.execute("SELECT 1 FROM runs WHERE id=?", (run_id,)).fetchone() is not None
    except sqlite3.Error:
        return False  # no store


def delete_run(store: Store, run: RunRow, *, keep_files: bool = False, force: bool = False) -> int:
    """Delete a run with its episodes and its folder. Returns how many episodes went.

    Raises UsageError if another process holds the run, unless `force`; StoreError, OSError.
    """
    if not force:
        store.claim(run.id, "runs delete")
    folder = None if keep_files else run_folder(store.path, run)
    count = store.delete_run(run.id)
    if folder is not None:
        shutil.rmtree(folder)
    return count
