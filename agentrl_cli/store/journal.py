"""The exchange with watchers: live episodes, logs, events and alerts, and controls."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from agentrl_cli.store.buffer import TEXT_TAIL
from agentrl_cli.store.codec import clean, dumps, loads, marks
from agentrl_cli.store.file import Part
from agentrl_cli.store.rows import ControlRow, LiveRow, WorkerRow, build, columns
from agentrl_cli.types import AgentState

AGENT_STDERR = "agent_stderr"
"""Kind of the events that hold what the agents of episodes wrote."""
WAITING = "waiting"
"""Kind of the events that hold what a run waits for, in `lines`; none: it goes on."""
INPUTS = "inputs"
"""The event with what a training is made from besides its settings; its data has the `model`, RUN@STEP of a
checkpoint."""
HEALED = "healed"
"""Kind of the events that hold what a training changed by itself (`train.heal`)."""
_ADD_EVENT = "INSERT INTO events (run_id, at, kind, data) VALUES (?,?,?,?)"


class Live(Part):
    """The state of running episodes."""

    def set(self, episode_id: str, state: AgentState, turn: int, text: str = "") -> None:
        """Set the state of a running episode; only the newest is written."""
        with self.file.lock:
            running = self.file.running(episode_id)
            if running is None:
                self.file.write_later(
                    "UPDATE live SET state=?, turn=?, text=?, updated=? WHERE episode_id=?",
                    (str(state), turn, clean(text[-TEXT_TAIL:]), time.time(), episode_id),
                )
            else:
                running.state = (str(state), turn, text, time.time())
                self.file.wake()

    def all(self, run_id: str | None = None) -> list[LiveRow]:
        """Return the episodes that run now, in the order they were started; of all runs if None."""
        return [
            LiveRow(*row)
            for row in self.file.select(
                "SELECT l.episode_id, l.run_id, e.task_id, e.sample, l.state, l.turn, l.text, l.started, l.updated,"
                " e.kind"
                " FROM live l JOIN episodes e ON e.id=l.episode_id WHERE ?1 IS NULL OR l.run_id=?1 ORDER BY e.rowid",
                (run_id,),
            )
        ]


class Workers(Part):
    """The workers of runs."""

    def put(self, rows: Iterable[WorkerRow]) -> None:
        """Queue the state of workers; it replaces the one before."""
        names = columns(WorkerRow)
        for row in rows:
            self.file.write_later(
                f"INSERT OR REPLACE INTO workers VALUES ({marks(len(names))})",
                [getattr(row, name) for name in names],
            )

    def all(self, run_id: str) -> list[WorkerRow]:
        """Return the workers of a run, by number."""
        sql = f"SELECT {','.join(columns(WorkerRow))} FROM workers WHERE run_id=? ORDER BY number"
        return [WorkerRow(*row) for row in self.file.select(sql, (run_id,))]


class Journal(Part):
    """Logs, events and alerts of runs. Writes wait a moment."""

    def add_log(self, run_id: str | None, level: str, text: str) -> None:
        """Queue a line of the run's log."""
        self.file.write_later(
            "INSERT INTO logs (run_id, at, level, text) VALUES (?,?,?,?)",
            (run_id, time.time(), level, clean(text)),
        )

    def logs(self, run_id: str | None, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the newest `limit` log lines with an id above `since`, oldest first:

        `{"id", "at", "level", "text"}`.
        """
        return self._tail("logs", "id, at, level, text", run_id, since, limit)

    def add_event(
        self, run_id: str | None, kind: str, data: Mapping[str, Any] | None = None
    ) -> None:
        """Queue an event, drawn as a mark on the curves."""
        self.file.write_later(_ADD_EVENT, (run_id, time.time(), kind, dumps(dict(data or {}))))

    def events(self, run_id: str | None, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Return events with an id above `since`, oldest first: `{"id", "at", "kind", "data"}`."""
        rows = self._tail("events", "id, at, kind, data", run_id, since, limit)
        return [{**row, "data": loads(row["data"])} for row in rows]

    def newest_event(self, run_id: str, kind: str) -> dict[str, Any] | None:
        """Return the data of a run's newest event of a kind, None if absent."""
        sql = "SELECT data FROM events WHERE run_id=? AND kind=? ORDER BY id DESC LIMIT 1"
        row = self.file.select_one(sql, (run_id, kind))
        return None if row is None else dict(loads(row[0]))

    def healed(self, run_id: str) -> list[dict[str, Any]]:
        """Return how a training healed, the oldest first: `{"step", "rule", "key", "from", "to", "back"}`."""
        sql = "SELECT data FROM events WHERE run_id=? AND kind=? ORDER BY id"
        return [dict(loads(data)) for (data,) in self.file.select(sql, (run_id, HEALED))]

    def waits(self, run_id: str) -> list[str]:
        """Return the things that a run waits for as it last said, a line each, the oldest first."""
        return list((self.newest_event(run_id, WAITING) or {"lines": ()})["lines"])

    def agent_stderr(self, run_id: str | None, episode_id: str) -> str:
        """Return the end of the stderr of an episode's agent; empty if it wrote nothing."""
        row = self.file.select_one(
            "SELECT data FROM events WHERE run_id IS ? AND kind=? AND json_extract(data, '$.episode')=? LIMIT 1",
            (run_id, AGENT_STDERR, episode_id),
        )
        return str(loads(row[0])["text"]) if row else ""

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

        With a step it is stored once, even if a resume repeats the step.
        """
        self.file.write_later(
            "INSERT INTO alerts (run_id, at, level, name, value, threshold, text, step) SELECT ?1,?2,?3,?4,?5,?6,?7,?8"
            " WHERE ?8 IS NULL OR NOT EXISTS (SELECT 1 FROM alerts WHERE run_id IS ?1 AND name=?4 AND step=?8)",
            (run_id, time.time(), level, name, value, threshold, clean(text), step),
        )

    def folded_alerts(self, run_id: str | None) -> list[dict[str, Any]]:
        """Return alerts by kind, the newest last.

        Each is `{"name", "level", "count", "first", "last", "first_step", "last_step", "value", "threshold",
        "text", "id"}`; level, value, text and id are those of the newest.
        """
        # SQLite takes bare columns from the row that has the maximum.
        return self.file.select_dicts(
            "SELECT name, level, count(*) AS count, min(at) AS first, at AS last, min(step) AS first_step,"
            " step AS last_step, value, threshold, text, max(id) AS id FROM alerts WHERE run_id IS ? GROUP BY name"
            " ORDER BY max(id)",
            (run_id,),
        )

    def _tail(
        self, table: str, names: str, run_id: str | None, since: int, limit: int
    ) -> list[dict[str, Any]]:
        sql = f"SELECT {names} FROM {table} WHERE run_id IS ? AND id>? ORDER BY id DESC LIMIT ?"
        return self.file.select_dicts(sql, (run_id, since, limit))[::-1]


class Controls(Part):
    """Requests of people to a running training."""

    def add(self, run_id: str, action: str, data: Mapping[str, Any] | None = None) -> int:
        """Ask a running training to pause, resume, checkpoint, evaluate, set or stop. Returns the id."""
        with self.file.transaction() as conn:
            cursor = conn.execute(
                "INSERT INTO controls (run_id, at, action, data) VALUES (?,?,?,?)",
                (run_id, time.time(), action, dumps(dict(data or {}))),
            )
            return int(cursor.lastrowid or 0)

    def take(self, run_id: str, event: str = "control") -> list[ControlRow]:
        """Take the waiting controls, oldest first, each once; every one leaves an event."""
        wanted = "SELECT id, run_id, at, action, data FROM controls WHERE run_id=? AND taken IS NULL ORDER BY id"
        if not self.file.select(
            wanted, (run_id,), settled=False
        ):  # the usual case costs no write lock
            return []
        now = time.time()
        with self.file.transaction() as conn:
            rows = conn.execute(wanted, (run_id,)).fetchall()
            taken = [build(ControlRow, row, data=loads(row[4]), taken=now) for row in rows]
            for row in taken:
                conn.execute("UPDATE controls SET taken=? WHERE id=?", (now, row.id))
                text = dumps({"id": row.id, **row.data})
                conn.execute(_ADD_EVENT, (run_id, now, f"{event}:{row.action}", text))
        return taken

    def all(self, run_id: str) -> list[ControlRow]:
        """Return all controls of a run, oldest first, taken or not."""
        sql = "SELECT id, run_id, at, action, data, taken FROM controls WHERE run_id=? ORDER BY id"
        rows = self.file.select(sql, (run_id,), settled=False)
        return [build(ControlRow, row, data=loads(row[4])) for row in rows]
