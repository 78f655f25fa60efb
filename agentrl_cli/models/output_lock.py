"""Locks the folder that `sft` and `merge` write a model to, and the run that it lies in."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from agentrl_cli.errors import UsageError
from agentrl_cli.errors import writing as disk_writing


@contextlib.contextmanager
def writing(out: Path, doing: str, db: Path | None) -> Iterator[None]:
    """Lock the folder `out` for the command `doing` while the block runs, and the stored run that it lies in.

    First deletes leftovers of a process that died beside `out`.
    Raises UsageError if another process writes there or works on that run; StoreError if it is not writable.
    """
    from agentrl_cli.models.checkpoint import sweep

    named, out = str(out), out.resolve()  # one lock for a folder and the links to it
    with contextlib.ExitStack() as stack:
        if db is not None and db.is_file():
            stack.enter_context(_run_around(out, doing, db))
        stack.enter_context(_hold_lock(out, named, doing))
        sweep(out.parent, out.name)
        yield


@contextlib.contextmanager
def _run_around(out: Path, doing: str, db: Path) -> Iterator[None]:
    from agentrl_cli.store import Store

    if not out.is_relative_to(db.parent.resolve()):
        yield
        return
    with Store.open(db) as store:
        runs = [
            run
            for run in store.runs.all()
            if run.dir and out.is_relative_to(Path(run.dir).resolve())
        ]
        with store.claims.hold(runs[0].id, doing) if runs else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def _hold_lock(out: Path, named: str, doing: str) -> Iterator[None]:
    """Yield a lock on a file beside the folder `named` by the user; the kernel releases it when the process exits."""
    path = out.with_name(f".{out.name}.lock")
    with disk_writing(named, hint="Choose another folder, or free some space."):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _lock(path, out)
    with file:
        file.truncate(0)
        file.write(f"agentrl {doing} (process {os.getpid()})")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock(path: Path, out: Path) -> TextIO:
    """Return the file, open and locked. Raises UsageError if another process holds it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            file.seek(0)
            who = file.read() or "another process"
            file.close()
            hint = "Wait until it has ended, or name another folder."
            raise UsageError(f"{out} is being written by {who}.", hint=hint) from None
        except FileNotFoundError:
            pass  # the holder exited and removed the file between the two calls above
        file.close()
