"""Reading runs, steps, evaluations and what a watcher follows. Times are seconds since the epoch."""

from __future__ import annotations

import zlib
from typing import Any

from agentrl_cli.errors import NotFound
from agentrl_cli.store.base import StoreBase
from agentrl_cli.store.codec import decoding, load_metrics, loads
from agentrl_cli.store.places import absolute
from agentrl_cli.store.rows import CheckpointRow, ControlRow, EvalRow, LiveRow, RunRow, TokenizerRow, build, columns
from agentrl_cli.types import Task

_RUN = f"SELECT {','.join(columns(RunRow))} FROM runs"
_EVAL = f"SELECT {','.join(columns(EvalRow))} FROM evals"
_CHECKPOINT = f"SELECT {','.join(columns(CheckpointRow))} FROM checkpoints"


class RunReader(StoreBase):
    """Everything about runs."""

    def runs(self) -> list[RunRow]:
        """All runs, the newest first."""
        return [self._run(row) for row in self._rows(f"{_RUN} ORDER BY started DESC, rowid DESC")]

    def run(self, name: str) -> RunRow:
        """A run by name, by id, by a unique prefix of either, or `last`. Raises NotFound naming the nearest."""
        if name == "last":
            found = self._rows(f"{_RUN} ORDER BY started DESC, rowid DESC LIMIT 1")
            if not found:
                raise NotFound(f"There are no runs in {self.path}.", hint="`agentrl train` makes one.")
            return self._run(found[0])
        found = self._rows(f"{_RUN} WHERE name=? OR id=?", (name, name.lower()))
        if not found and name:
            found = self._rows(
                f"{_RUN} WHERE substr(name,1,?)=? OR substr(id,1,?)=?", (len(name), name, len(name), name.lower())
            )
        if len(found) == 1:
            return self._run(found[0])
        names = [row[0] for row in self._rows("SELECT name FROM runs ORDER BY started DESC")]
        if found:
            several = ", ".join(sorted(self._run(row).name for row in found))
            raise NotFound(f"{name!r} could be several runs.", hint=f"Which one: {several}?")
        raise NotFound.of("run", name, names)

    def steps(self, run_id: str, since: int = 0) -> list[dict[str, Any]]:
        """The metrics of each step ≥ `since`, flat: `{"step": 3, "at": 1.7e9, "reward": 0.4, …}`."""
        rows = self._rows(
            "SELECT step, at, metrics FROM steps WHERE run_id=? AND step>=? ORDER BY step", (run_id, since)
        )
        return [{**load_metrics(metrics), "step": step, "at": at} for step, at, metrics in rows]

    def evals(self, run_id: str | None) -> list[EvalRow]:
        """The evaluations of a run (None: of no run), oldest first."""
        rows = self._rows(f"{_EVAL} WHERE run_id IS ? ORDER BY id", (run_id,))
        place = columns(EvalRow).index("metrics")
        return [build(EvalRow, row, metrics=load_metrics(row[place])) for row in rows]

    def checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """The checkpoints of a run, oldest first."""
        rows = self._rows(f"{_CHECKPOINT} WHERE run_id=? ORDER BY id", (run_id,))
        return [
            build(CheckpointRow, row, path=absolute(self.home, row[3]), metrics=load_metrics(row[4])) for row in rows
        ]

    def live(self, run_id: str | None = None) -> list[LiveRow]:
        """The episodes that run now, in the order they were started; of all runs where None is given."""
        return [
            LiveRow(*row)
            for row in self._rows(
                "SELECT l.episode_id, l.run_id, e.task_id, e.sample, l.state, l.turn, l.text, l.started, l.updated,"
                " e.kind"
                " FROM live l JOIN episodes e ON e.id=l.episode_id WHERE ?1 IS NULL OR l.run_id=?1 ORDER BY e.rowid",
                (run_id,),
            )
        ]

    def tail_events(self, run_id: str | None, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Events with an id above `since`, oldest first: `{"id", "at", "kind", "data"}`."""
        rows = self._tail("events", "id, at, kind, data", run_id, since, limit)
        return [{**row, "data": loads(row["data"])} for row in rows]

    def logs(self, run_id: str | None, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """The newest `limit` log lines with an id above `since`, oldest first: `{"id", "at", "level", "text"}`."""
        return self._tail("logs", "id, at, level, text", run_id, since, limit)

    def alerts(self, run_id: str | None, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """The newest alerts, oldest first: `{"id", "at", "level", "name", "value", "threshold", "text"}`."""
        return self._tail("alerts", "id, at, level, name, value, threshold, text", run_id, since, limit)

    def folded_alerts(self, run_id: str | None) -> list[dict[str, Any]]:
        """Alerts by kind, the newest last: `{"name", "level", "count", "first", "last", "first_step", "last_step",
        "value", "threshold", "text", "id"}`; level, value, text and id are those of the newest."""
        known = self._rows("SELECT 1 FROM pragma_table_info('alerts') WHERE name='step'")
        step = "step" if known else "NULL"  # a store of before, which readers do not bring up to date
        # SQLite takes bare columns from the row that has the maximum.
        sql = (
            f"SELECT name, level, count(*) AS count, min(at) AS first, at AS last, min({step}) AS first_step,"
            f" {step} AS last_step, value, threshold, text, max(id) AS id FROM alerts WHERE run_id IS ? GROUP BY name"
            " ORDER BY max(id)"
        )
        return self._dicts(sql, (run_id,))

    def _tail(self, table: str, names: str, run_id: str | None, since: int, limit: int) -> list[dict[str, Any]]:
        sql = f"SELECT {names} FROM {table} WHERE run_id IS ? AND id>? ORDER BY id DESC LIMIT ?"
        return self._dicts(sql, (run_id, since, limit))[::-1]

    def controls(self, run_id: str) -> list[ControlRow]:
        """All controls of a run, oldest first, taken or not."""
        rows = self._rows(
            "SELECT id, run_id, at, action, data, taken FROM controls WHERE run_id=? ORDER BY id", (run_id,)
        )
        return [build(ControlRow, row, data=loads(row[4])) for row in rows]

    def waiting_controls(self, run_id: str) -> list[ControlRow]:
        """The controls of a run that nobody took yet, oldest first."""
        rows = self._rows(
            "SELECT id, run_id, at, action, data, taken FROM controls WHERE run_id=? AND taken IS NULL ORDER BY id",
            (run_id,),
            settled=False,
        )
        return [build(ControlRow, row, data=loads(row[4])) for row in rows]

    def tokenizer(self, hash: str) -> TokenizerRow | None:
        """A stored tokenizer, None where this store does not have it."""
        row = self._row("SELECT hash, tokenizer_json, chat_template, specials FROM tokenizers WHERE hash=?", (hash,))
        with decoding("A stored tokenizer"):
            return TokenizerRow(row[0], zlib.decompress(row[1]).decode(), row[2], loads(row[3])) if row else None

    def attachment(self, hash: str) -> bytes | None:
        """A stored image."""
        row = self._row("SELECT data FROM attachments WHERE hash=?", (hash,))
        return row[0] if row else None

    def task(self, task_id: str, pack: str | None = None) -> Task | None:
        """A stored task, None where this store does not have it."""
        row = self._row(
            "SELECT id, pack, family, split, prompt, data, tools FROM tasks WHERE id=?1 AND (?2 IS NULL OR pack=?2)",
            (task_id, pack),
        )
        if row is None:
            return None
        tools = None if row[6] is None else tuple(loads(row[6]))
        return build(Task, row, prompt=tuple(loads(row[4])), data=loads(row[5]), tools=tools)

    def _run(self, row: tuple[Any, ...]) -> RunRow:
        place = columns(RunRow).index("dir")
        return build(RunRow, row, dir=absolute(self.home, row[place]), config=loads(row[-1]))
