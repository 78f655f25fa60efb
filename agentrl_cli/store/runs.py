"""Runs, and what belongs to a run's steps: metrics, evaluations, checkpoints. Times are seconds since the epoch.

One process at a time works on a run, and claims its row before it changes anything else. A claim is taken in one
transaction, and only from a dead process. While it is held a thread writes a heartbeat for processes on other
machines. A process that was frozen for long enough may have lost its claim when it resumes: `why_lost` returns why.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ConfigError, NotFound, StoreError, UsageError
from agentrl_cli.store.codec import dump_metrics, dumps, load_metrics, loads, marks
from agentrl_cli.store.connection import connect
from agentrl_cli.store.episode_sql import DROP_IMAGES, NAME_TOKENIZER
from agentrl_cli.store.file import Part
from agentrl_cli.store.holder import STALE, Holder
from agentrl_cli.store.places import absolute, new_folder, to_stored
from agentrl_cli.store.rows import CheckpointRow, EvalRow, RunRow, build, columns
from agentrl_cli.types import new_id

RENAMED = "renamed"
"""The event of a run; its data has the name `before`."""
_RUN_COLUMNS = columns(RunRow)
_RUN = f"SELECT {','.join(_RUN_COLUMNS)} FROM runs"
_RENAMED = (
    f"SELECT run_id FROM events WHERE kind='{RENAMED}' AND json_extract(data,'$.before')=?"
    " ORDER BY id DESC"
)
# Its parent may be in another store, or deleted.
_VALUES = {"parent_id": "(SELECT id FROM runs WHERE id=?)"}
_ADD_RUN = (
    f"INSERT INTO runs ({','.join(_RUN_COLUMNS)})"
    f" VALUES ({','.join(_VALUES.get(column, '?') for column in _RUN_COLUMNS)})"
)


class Runs(Part):
    """Runs with their steps, evaluations and checkpoints."""

    def add(self, run: RunRow) -> RunRow:
        """Insert a run; fills in an empty id and start, numbers a taken name. Returns it as stored.

        The name is made one word of a shell, since messages print commands with it.
        A running one is held by the process of its `pid`, by default this one.
        """
        now = time.time()
        pid, pid_started, boot, host = astuple(Holder.of(run.pid or None))
        run = replace(
            run,
            id=run.id or new_id(),
            started=run.started or now,
            heartbeat=run.heartbeat or now,
            claim=run.claim or (run.kind if run.status == "running" else ""),
            pid=pid,
            pid_started=run.pid_started or pid_started,
            boot=run.boot or boot,
            host=run.host or host,
            dir=absolute(self.file.home, run.dir),
        )
        with self.file.transaction() as conn:
            stem = re.sub(r"[^\w.,:@%+=/-]+", "-", run.name or run.id)
            name, count = stem, 1
            while conn.execute("SELECT 1 FROM runs WHERE name=?", (name,)).fetchone():
                count += 1
                name = f"{stem}-{count}"
            run = replace(run, name=name)
            if run.tokenizer:
                conn.execute(NAME_TOKENIZER, (run.tokenizer,))
            conn.execute(
                _ADD_RUN, [self._run_value(column, getattr(run, column)) for column in _RUN_COLUMNS]
            )
        return run

    def all(self) -> list[RunRow]:
        """Return all runs, the newest first."""
        return [
            self._run(row) for row in self.file.select(f"{_RUN} ORDER BY started DESC, rowid DESC")
        ]

    def get(self, name: str) -> RunRow:
        """Return a run by name, by id, by a unique prefix of either, or `last`. Raises NotFound naming the nearest."""
        if name == "last":
            found = self.file.select(f"{_RUN} ORDER BY started DESC, rowid DESC LIMIT 1")
            if not found:
                raise NotFound(f"No runs in {self.file.path}.", hint="`agentrl train` makes one.")
            return self._run(found[0])
        found = self.file.select(f"{_RUN} WHERE name=? OR id=?", (name, name.lower()))
        # A former name may stand in settings, in that of a checkpoint.
        found = found or self.file.select(f"{_RUN} WHERE id=({_RENAMED})", (name,))
        if not found and name:
            found = self.file.select(
                f"{_RUN} WHERE substr(name,1,?)=? OR substr(id,1,?)=?",
                (len(name), name, len(name), name.lower()),
            )
        if len(found) == 1:
            return self._run(found[0])
        names = [row[0] for row in self.file.select("SELECT name FROM runs ORDER BY started DESC")]
        if found:
            several = ", ".join(sorted(self._run(row).name for row in found))
            raise NotFound(f"{name!r} could be several runs.", hint=f"Which one: {several}?")
        raise NotFound.of("run", name, names)

    def training(self, name: str) -> RunRow:
        """Return a training as `get` does; `last` is the newest training. Raises NotFound, ConfigError."""
        if name == "last":
            row = next((row for row in self.all() if row.kind == "train"), None)
            if row is None:
                raise NotFound(
                    f"No training in {self.file.path}.", hint="`agentrl train` starts one."
                )
            return row
        row = self.get(name)
        if row.kind != "train":
            raise ConfigError(f"{row.name} is of the kind {row.kind}, not a training.")
        return row

    def update(self, run_id: str, **cols: Any) -> None:
        """Set columns of a run: `status`, `step`, `ended`, `error`… Raises NotFound for an unknown column or run."""
        for name in cols:
            if name not in _RUN_COLUMNS or name == "id":
                raise NotFound.of("column of runs", name, _RUN_COLUMNS)
        sets = ", ".join(f"{name}=?" for name in cols)
        with self.file.transaction() as conn:
            values = [self._run_value(name, value) for name, value in cols.items()]
            if cols.get("tokenizer"):
                conn.execute(NAME_TOKENIZER, (cols["tokenizer"],))
            if not conn.execute(f"UPDATE runs SET {sets} WHERE id=?", [*values, run_id]).rowcount:
                raise NotFound(f"No run {run_id!r} in {self.file.path}.")

    def rename(self, run_id: str, name: str) -> None:
        """Set a run's name; the former one still means it until another run has that.

        Raises UsageError if it is taken, or is not one word of a shell as `add` makes it.
        """
        if name == "last" or not re.fullmatch(r"(?!-)[\w.,:@%+=/-]+", name):
            raise UsageError(
                f"{name!r} cannot be the name of a run.", hint="Take letters, digits, and . _ or -."
            )
        if self.file.select("SELECT 1 FROM runs WHERE name=?", (name,)):
            raise UsageError(
                f"A run {name!r} exists already.", hint="Names are unique within a store."
            )
        with self.file.transaction() as conn:
            conn.execute(
                f"INSERT INTO events (run_id, at, kind, data) SELECT id, ?, '{RENAMED}',"
                " json_object('before', name) FROM runs WHERE id=?",
                (time.time(), run_id),
            )
            self.update(run_id, name=name)

    def names(self, run_id: str) -> set[str]:
        """Return the name of a run and those that it had: versions of its weights begin with one of them."""
        sql = "SELECT name FROM runs WHERE id=?1 UNION SELECT json_extract(data,'$.before') FROM events"
        found = self.file.select(f"{sql} WHERE run_id=?1 AND kind='{RENAMED}'", (run_id,))
        return {name for (name,) in found}

    def add_folder(self, run: RunRow) -> RunRow:
        """Return the run with its own folder beside the store, created if absent. Raises StoreError."""
        if self.file.home is None:
            raise StoreError("A store in memory has no folder for a run.", hint="Open a file.")
        folder = Path(run.dir) if run.dir else new_folder(self.file.home, run.name)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if not run.dir:
            self.update(run.id, dir=str(folder))
        return replace(run, dir=str(folder))

    def delete(self, run_id: str) -> int:
        """Delete a run and everything that belongs to it. Returns the number of deleted episodes."""
        with self.file.transaction() as conn:
            count = int(
                conn.execute("SELECT count(*) FROM episodes WHERE run_id=?", (run_id,)).fetchone()[
                    0
                ]
            )
            conn.execute("DELETE FROM runs WHERE id=?", (run_id,))
            conn.execute(DROP_IMAGES)
        return count

    def add_step(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
        """Store metrics of a step, added to those it has. Advances the run's `step`."""
        with self.file.transaction() as conn:
            old = conn.execute(
                "SELECT metrics FROM steps WHERE run_id=? AND step=?", (run_id, step)
            ).fetchone()
            merged = {**load_metrics(old[0]), **metrics} if old else metrics
            conn.execute(
                "INSERT INTO steps (run_id, step, at, metrics) VALUES (?,?,?,?)"
                " ON CONFLICT DO UPDATE SET metrics=excluded.metrics",
                (run_id, step, time.time(), dump_metrics(merged)),
            )
            conn.execute("UPDATE runs SET step=max(step, ?) WHERE id=?", (step, run_id))

    def steps(self, run_id: str, since: int = 0) -> list[dict[str, Any]]:
        """Return the metrics of each step ≥ `since`, flat: `{"step": 3, "at": 1.7e9, "reward": 0.4, …}`."""
        sql = "SELECT step, at, metrics FROM steps WHERE run_id=? AND step>=? ORDER BY step"
        return [
            {**load_metrics(metrics), "step": step, "at": at}
            for step, at, metrics in self.file.select(sql, (run_id, since))
        ]

    def add_eval(self, row: EvalRow) -> int:
        """Store an evaluation. Returns its id."""
        with self.file.transaction() as conn:
            cursor = conn.execute(
                "INSERT INTO evals (run_id, step, name, split, n_tasks, n_samples, pass_rate, low, high, metrics, at)"
                f" VALUES ({marks(11)})",
                (
                    row.run_id,
                    row.step,
                    row.name,
                    row.split,
                    row.n_tasks,
                    row.n_samples,
                    row.pass_rate,
                    row.low,
                    row.high,
                    dump_metrics(row.metrics),
                    row.at or time.time(),
                ),
            )
            return int(cursor.lastrowid or 0)

    def evals(self, run_id: str | None) -> list[EvalRow]:
        """Return the evaluations of a run (None: of no run), oldest first."""
        names = columns(EvalRow)
        sql = f"SELECT {','.join(names)} FROM evals WHERE run_id IS ? ORDER BY id"
        place = names.index("metrics")
        rows = self.file.select(sql, (run_id,))
        return [build(EvalRow, row, metrics=load_metrics(row[place])) for row in rows]

    def add_checkpoint(
        self,
        run_id: str,
        step: int,
        path: os.PathLike[str] | str,
        metrics: Mapping[str, Any],
        kind: str = "step",
    ) -> None:
        """Store a checkpoint; `best` and `last` replace the previous one."""
        with self.file.transaction() as conn:
            if kind in ("best", "last"):
                conn.execute("DELETE FROM checkpoints WHERE run_id=? AND kind=?", (run_id, kind))
            conn.execute(
                "INSERT OR REPLACE INTO checkpoints (run_id, step, kind, path, metrics, at) VALUES (?,?,?,?,?,?)",
                (
                    run_id,
                    step,
                    kind,
                    to_stored(self.file.home, str(path)),
                    dump_metrics(metrics),
                    time.time(),
                ),
            )

    def checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """Return the checkpoints of a run, oldest first."""
        sql = (
            f"SELECT {','.join(columns(CheckpointRow))} FROM checkpoints WHERE run_id=? ORDER BY id"
        )
        return [
            build(
                CheckpointRow,
                row,
                path=absolute(self.file.home, row[3]),
                metrics=load_metrics(row[4]),
            )
            for row in self.file.select(sql, (run_id,))
        ]

    def remove_checkpoint(self, run_id: str, path: os.PathLike[str] | str) -> None:
        """Forget a checkpoint whose folder was deleted."""
        of = (run_id, to_stored(self.file.home, str(path)))
        self.file.write("DELETE FROM checkpoints WHERE run_id=? AND path=?", of)

    def _run_value(self, column: str, value: Any) -> Any:
        if column == "dir":
            return to_stored(self.file.home, value)
        if column == "tokenizer":
            return value or None
        return dumps(dict(value)) if isinstance(value, Mapping) else value

    def _run(self, row: tuple[Any, ...]) -> RunRow:
        folder, tokenizer = (row[_RUN_COLUMNS.index(name)] for name in ("dir", "tokenizer"))
        place, settings = absolute(self.file.home, folder), _by_todays_names(loads(row[-1]))
        return build(RunRow, row, dir=place, tokenizer=tokenizer or "", config=settings)


def _by_todays_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings under today's names; an older version's KL is a number or a name."""
    if isinstance(settings.get("algo", {}).get("kl", {}), Mapping):
        return settings
    from agentrl_cli.config.models import (
        mains,
    )  # late: the settings' models take longer than `agentrl ls`
    from agentrl_cli.config.renamed import by_todays_names

    return by_todays_names(settings, mains())


BEAT = STALE / 8
"""Seconds between two heartbeats."""

_HELD = "SELECT name, claim, heartbeat, pid, pid_started, boot, host FROM runs WHERE id=?"
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
            conn.execute(
                "UPDATE runs SET claim=?, heartbeat=?, pid=?, pid_started=?, boot=?, host=? WHERE id=?",
                (doing, time.time(), *astuple(me), run_id),
            )

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
