"""Writing runs, episodes and everything around them.

Logs, events, alerts and signals wait a moment (base.py); the rest is committed at once. `with store.transaction():`
makes several writes one, a training step for instance.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from agentrl_cli.errors import NotFound, StoreError
from agentrl_cli.store.base import StoreBase
from agentrl_cli.store.codec import (
    bytes_blob,
    clean,
    dump_metrics,
    dumps,
    float_bytes,
    load_metrics,
    marks,
    no_number,
)
from agentrl_cli.store.holder import Holder
from agentrl_cli.store.live_buffer import SAID
from agentrl_cli.store.places import absolute, new_folder, stored
from agentrl_cli.store.rows import ControlRow, EvalRow, RunRow, build, columns
from agentrl_cli.store.statements import PUT_DRIFT
from agentrl_cli.types import AgentState, Task, TrainSignals, new_id
from agentrl_cli.types.content import media_type

_RUN_COLUMNS = columns(RunRow)
_ADD_RUN = f"INSERT INTO runs ({','.join(_RUN_COLUMNS)}) VALUES ({marks(len(_RUN_COLUMNS))})"
_ADD_LOG = "INSERT INTO logs (run_id, at, level, text) VALUES (?,?,?,?)"
_ADD_EVENT = "INSERT INTO events (run_id, at, kind, data) VALUES (?,?,?,?)"
_ADD_ALERT = (
    "INSERT INTO alerts (run_id, at, level, name, value, threshold, text, step) SELECT ?1,?2,?3,?4,?5,?6,?7,?8"
    " WHERE ?8 IS NULL OR NOT EXISTS (SELECT 1 FROM alerts WHERE run_id IS ?1 AND name=?4 AND step=?8)"
)
_SET_FACT = "UPDATE episodes SET fact=?, advantage=coalesce(?, advantage) WHERE id=?"
_NUMBERS = ("advantage", "logp_train", "ratio", "weight", "logp_ref", "value", "returns")
_SET_SIGNALS = (
    f"UPDATE turn_tokens SET {', '.join(f'{name}=?' for name in _NUMBERS)}, clipped=? WHERE episode_id=? AND idx=?"
)


class RunWriter(StoreBase):
    """Rows about runs, steps, evaluations, and what a person sends to a running one."""

    def add_run(self, run: RunRow) -> RunRow:
        """Insert a run; empty id and start are filled in, a taken name gets a number. Returns it as stored.

        One that is running is held by the process of its `pid`, by default this one.
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
            dir=absolute(self.home, run.dir),
        )
        with self.transaction() as conn:
            name, count = run.name or run.id, 1
            while conn.execute("SELECT 1 FROM runs WHERE name=?", (name,)).fetchone():
                count += 1
                name = f"{run.name}-{count}"
            run = replace(run, name=name)
            conn.execute(_ADD_RUN, [self._run_value(column, getattr(run, column)) for column in _RUN_COLUMNS])
        return run

    def add_folder(self, run: RunRow) -> RunRow:
        """The run with a folder of its own beside the store; one is made if it has none. Raises StoreError."""
        if self.home is None:
            raise StoreError("A store in memory has no folder for a run.", hint="Open a file.")
        folder = Path(run.dir) if run.dir else new_folder(self.home, run.name)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if not run.dir:
            self.update_run(run.id, dir=str(folder))
        return replace(run, dir=str(folder))

    def update_run(self, run_id: str, **cols: Any) -> None:
        """Set columns of a run: `status`, `step`, `ended`, `error`… Raises NotFound for an unknown column or run."""
        for name in cols:
            if name not in _RUN_COLUMNS or name == "id":
                raise NotFound.of("column of runs", name, _RUN_COLUMNS)
        sets = ", ".join(f"{name}=?" for name in cols)
        with self.transaction() as conn:
            values = [self._run_value(name, value) for name, value in cols.items()]
            if not conn.execute(f"UPDATE runs SET {sets} WHERE id=?", [*values, run_id]).rowcount:
                raise NotFound(f"No run {run_id!r} in {self.path}.")

    def delete_run(self, run_id: str) -> int:
        """Delete a run and all that belongs to it. Returns how many episodes went."""
        with self.transaction() as conn:
            count = int(conn.execute("SELECT count(*) FROM episodes WHERE run_id=?", (run_id,)).fetchone()[0])
            conn.execute("DELETE FROM runs WHERE id=?", (run_id,))
            conn.execute(
                "DELETE FROM attachments WHERE hash NOT IN"
                " (SELECT value FROM tool_calls, json_each(tool_calls.images) WHERE images IS NOT NULL)"
            )
        return count

    def add_step(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step; a second call for the same step adds to them. Also advances the run's `step`."""
        now = time.time()
        with self.transaction() as conn:
            old = conn.execute("SELECT metrics FROM steps WHERE run_id=? AND step=?", (run_id, step)).fetchone()
            merged = {**load_metrics(old[0]), **metrics} if old else metrics
            conn.execute(
                "INSERT INTO steps (run_id, step, at, metrics) VALUES (?,?,?,?)"
                " ON CONFLICT DO UPDATE SET metrics=excluded.metrics",
                (run_id, step, now, dump_metrics(merged)),
            )
            conn.execute("UPDATE runs SET step=max(step, ?) WHERE id=?", (step, run_id))

    def add_tasks(self, tasks: Iterable[Task]) -> None:
        """Store tasks; one that is there already is replaced."""
        rows = [
            (
                task.pack,
                task.id,
                task.family,
                task.split,
                dumps(task.prompt),
                dumps(dict(task.data)),
                None if task.tools is None else dumps(task.tools),
            )
            for task in tasks
        ]
        with self.transaction() as conn:
            conn.executemany("INSERT OR REPLACE INTO tasks VALUES (?,?,?,?,?,?,?)", rows)

    def add_eval(self, row: EvalRow) -> int:
        """Store an evaluation. Returns its id."""
        with self.transaction() as conn:
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

    def add_checkpoint(
        self, run_id: str, step: int, path: os.PathLike[str] | str, metrics: Mapping[str, Any], kind: str = "step"
    ) -> None:
        """Store a checkpoint; `best` and `last` replace the one before."""
        with self.transaction() as conn:
            if kind in ("best", "last"):
                conn.execute("DELETE FROM checkpoints WHERE run_id=? AND kind=?", (run_id, kind))
            conn.execute(
                "INSERT OR REPLACE INTO checkpoints (run_id, step, kind, path, metrics, at) VALUES (?,?,?,?,?,?)",
                (run_id, step, kind, stored(self.home, str(path)), dump_metrics(metrics), time.time()),
            )

    def remove_checkpoint(self, run_id: str, path: os.PathLike[str] | str) -> None:
        """Forget a checkpoint whose folder was deleted."""
        with self.transaction() as conn:
            conn.execute("DELETE FROM checkpoints WHERE run_id=? AND path=?", (run_id, stored(self.home, str(path))))

    def _run_value(self, column: str, value: Any) -> Any:
        if column == "dir":
            return stored(self.home, value)
        return dumps(dict(value)) if isinstance(value, Mapping) else value

    def add_event(self, run_id: str | None, kind: str, data: Mapping[str, Any] | None = None) -> None:
        """Queue an event: something that happened once, drawn as a mark on the curves."""
        self._later(_ADD_EVENT, (run_id, time.time(), kind, dumps(dict(data or {}))))

    def add_alert(
        self,
        run_id: str | None,
        level: str,
        name: str,
        value: float | None = None,
        threshold: float | None = None,
        text: str = "",
        *,
        step: int | None = None,
    ) -> None:
        """Queue an alert: level info | warn | bad, the rule's name, its value and threshold, what to try.

        With a step it is stored once, also where a resume goes through that step again.
        """
        self._later(_ADD_ALERT, (run_id, time.time(), level, name, value, threshold, clean(text), step))

    def add_log(self, run_id: str | None, level: str, text: str) -> None:
        """Queue a line of the run's log."""
        self._later(_ADD_LOG, (run_id, time.time(), level, clean(text)))

    def add_control(self, run_id: str, action: str, data: Mapping[str, Any] | None = None) -> int:
        """Ask a running training for something: pause, resume, checkpoint, evaluate, set, stop. Returns its id."""
        with self.transaction() as conn:
            cursor = conn.execute(
                "INSERT INTO controls (run_id, at, action, data) VALUES (?,?,?,?)",
                (run_id, time.time(), action, dumps(dict(data or {}))),
            )
            return int(cursor.lastrowid or 0)

    def take_controls(self, run_id: str, event: str = "control") -> list[ControlRow]:
        """The controls that nobody took yet, oldest first, each handed out once; taking one leaves an event."""
        wanted = "SELECT id, run_id, at, action, data FROM controls WHERE run_id=? AND taken IS NULL ORDER BY id"
        if not self._rows(wanted, (run_id,), settled=False):  # the usual case costs no write lock
            return []
        now = time.time()
        with self.transaction() as conn:
            rows = conn.execute(wanted, (run_id,)).fetchall()
            conn.executemany("UPDATE controls SET taken=? WHERE id=?", [(now, row[0]) for row in rows])
            taken = [build(ControlRow, row, data=load_metrics(row[4]), taken=now) for row in rows]
            conn.executemany(
                _ADD_EVENT,
                [(run_id, now, f"{event}:{row.action}", dumps({"id": row.id, **row.data})) for row in taken],
            )
        return taken

    def put_tokenizer(
        self, hash: str, tokenizer_json: str, chat_template: str = "", specials: Mapping[str, Any] | None = None
    ) -> None:
        """Keep a tokenizer, once per hash."""
        if self._rows("SELECT 1 FROM tokenizers WHERE hash=?", (hash,)):
            return
        packed = zlib.compress(tokenizer_json.encode(), 6)
        with self.transaction() as conn:
            conn.execute(
                "INSERT OR IGNORE INTO tokenizers VALUES (?,?,?,?)",
                (hash, packed, chat_template, dumps(dict(specials or {}))),
            )

    def put_attachment(self, data: bytes) -> str:
        """Keep an image, once. Returns its hash."""
        digest = hashlib.sha256(data).hexdigest()
        with self.transaction() as conn:
            conn.execute("INSERT OR IGNORE INTO attachments VALUES (?,?,?)", (digest, media_type(data), data))
        return digest


class MarkWriter(StoreBase):
    """What is added to episodes afterwards: facts, training signals, drift, tags, notes."""

    def set_live(self, episode_id: str, state: AgentState, turn: int, text: str = "") -> None:
        """What a running episode does now; only the newest state of each is written."""
        with self._lock:
            self._refuse_readonly()
            running = None if self._depth else self._running.get(episode_id)
            if running is not None:
                running.state = (str(state), turn, text, time.time())
            else:
                self._live[episode_id] = (str(state), turn, clean(text[-SAID:]), time.time(), episode_id)
            self._wake()

    def set_facts(self, rows: Iterable[tuple[str, str, float | None]]) -> None:
        """(episode id, `Fact` value, advantage or None) of every episode of a step."""
        with self.transaction() as conn:
            conn.executemany(_SET_FACT, [(str(fact), _finite(advantage), episode) for episode, fact, advantage in rows])

    def add_signals(self, episode_id: str, signals: TrainSignals) -> None:
        """Queue what training found per token; arrays over all tokens of the episode. Raises NotFound, ValueError."""
        rows = self._rows(
            "SELECT idx, n, advantage IS NOT NULL FROM turn_tokens WHERE episode_id=? ORDER BY idx", (episode_id,)
        )
        if not rows:
            raise NotFound(f"No turns of episode {episode_id!r} in {self.path}.")
        total = sum(n for _, n, _ in rows)
        if total != len(signals.advantage):
            raise ValueError(f"signals have {len(signals.advantage)} tokens, episode {episode_id} has {total}")
        whole = {name: None if (array := getattr(signals, name)) is None else float_bytes(array) for name in _NUMBERS}
        clipped, start, told = bytes_blob(signals.clipped), 0, False
        for index, n, known in rows:
            parts = [None if data is None else data[4 * start : 4 * (start + n)] for data in whole.values()]
            columns = [b"" if data is None or no_number(data) else data for data in parts]
            last = index == rows[-1][0] and not told
            if any(columns) or known or last:  # a turn without a number says nothing, but that all was written
                told = True
                values = [None if data is None else column for data, column in zip(parts, columns, strict=True)]
                flags = clipped[start : start + n]
                self._later(_SET_SIGNALS, (*values, flags if any(flags) else b"", episode_id, index))
            start += n

    def add_drift(self, episode_id: str, *, kind: str, turn: int, position: int, expected: str, got: str) -> None:
        """Queue a place where a rendering differs from the ids; that of a running episode is written with it."""
        row = (episode_id, kind, turn, position, clean(expected), clean(got))
        with self._lock:
            self._refuse_readonly()
            running = None if self._depth else self._running.get(episode_id)
            if running is None:
                self._later(PUT_DRIFT, row)
                return
            running.drift.append(row)
            self._wake()

    def add_tag(self, episode_id: str, tag: str) -> None:
        with self.transaction() as conn:
            conn.execute("INSERT OR IGNORE INTO tags VALUES (?,?,?)", (tag, episode_id, time.time()))

    def remove_tag(self, episode_id: str, tag: str) -> None:
        with self.transaction() as conn:
            conn.execute("DELETE FROM tags WHERE tag=? AND episode_id=?", (tag, episode_id))

    def set_note(self, episode_id: str, text: str) -> None:
        """Set the note of an episode; an empty one removes it."""
        with self.transaction() as conn:
            if text:
                conn.execute("INSERT OR REPLACE INTO notes VALUES (?,?,?)", (episode_id, clean(text), time.time()))
            else:
                conn.execute("DELETE FROM notes WHERE episode_id=?", (episode_id,))


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
