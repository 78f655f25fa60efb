"""Claims: one process at a time works on a run, and claims its row before it changes anything else.

A claim is taken in one transaction, and only from a dead process. While it is held a thread writes a heartbeat for
processes on other machines. A process that was frozen for long enough may have lost its claim when it resumes:
`why_lost` returns why.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple

from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.store.connection import connect
from agentrl_cli.store.file import Part
from agentrl_cli.store.holder import STALE, Holder

BEAT = STALE / 8
"""Seconds between two heartbeats."""

_HELD = "SELECT name, claim, heartbeat, pid, pid_started, boot, host FROM runs WHERE id=?"
_TAKE = "UPDATE runs SET claim=?, heartbeat=?, pid=?, pid_started=?, boot=?, host=? WHERE id=?"
_MINE = "WHERE id=? AND pid=? AND pid_started=? AND boot=? AND host=?"


class Claims(Part):
    """Claims on runs."""

    @contextlib.contextmanager
    def hold(self, run_id: str, doing: str) -> Iterator[None]:
        """Hold a run for this process while the block runs; `doing` is the command, for the message to others.

        A process may claim a run that it holds again. Raises UsageError if another one holds it, NotFound.
        """
        self.take(run_id, doing)
        me = (run_id, *astuple(Holder.of()))
        over = threading.Event()
        with contextlib.closing(connect(self.file.path)) as conn:
            beat = threading.Thread(
                target=_beat, args=(conn, me, over), name="agentrl-claim", daemon=True
            )
            beat.start()
            try:
                yield
            finally:
                over.set()
                beat.join()
                with contextlib.suppress(
                    sqlite3.Error
                ):  # a claim that cannot be released ends with this process
                    conn.execute(f"UPDATE runs SET claim='' {_MINE}", me)

    def take(self, run_id: str, doing: str) -> None:
        """Take a run for this process, without a heartbeat. Raises UsageError if another one holds it, NotFound."""
        me = Holder.of()
        with self.file.transaction() as conn:
            row = conn.execute(_HELD, (run_id,)).fetchone()
            if row is None:
                raise NotFound(f"No run {run_id!r} in {self.file.path}.")
            name, claim, heartbeat, *identity = row
            holder = Holder(*identity)
            if claim and holder != me and holder.lives(heartbeat):
                raise in_use(name, claim, holder)
            conn.execute(_TAKE, (doing, time.time(), *astuple(me), run_id))

    def why_lost(self, run_id: str) -> str:
        """Return why this process no longer holds a run, as a sentence; empty if it does."""
        rows = self.file.select(_HELD, (run_id,), settled=False)
        if not rows:
            return "The run was deleted while it ran."
        name, claim, _, *identity = rows[0]
        holder = Holder(*identity)
        if holder == Holder.of():
            return ""
        return (
            f"{name} was taken over by {_process(claim, holder)} while this process did not answer."
        )


def _beat(conn: sqlite3.Connection, me: tuple[str | int, ...], over: threading.Event) -> None:
    """Write heartbeats until the claim is over, on a connection that the run's transactions do not block."""
    while not over.wait(BEAT):
        # The disk may be full or the file locked: the next heartbeat is soon, and the run's own writes report it.
        with contextlib.suppress(sqlite3.Error):
            conn.execute(f"UPDATE runs SET heartbeat=? {_MINE}", (time.time(), *me))


def in_use(name: str, claim: str, holder: Holder) -> UsageError:
    """Return the error for a run that another process holds."""
    return UsageError(
        f"{name} is in use by {_process(claim, holder)}.",
        hint=f"Wait until it has ended, or stop it; `agentrl watch {name}` shows it.",
    )


def _process(claim: str, holder: Holder) -> str:
    return f"agentrl {claim or 'train'} (process {holder.pid} on {holder.host})"
