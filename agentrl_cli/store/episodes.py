"""Episodes: written when started, turn by turn and when finished; read as ids, list rows and whole.

An episode that was started by this store is kept in memory while it runs (buffer.py), so that one transaction
writes what all episodes did in the meantime. Any other is written at once.

`Stats` are numbers over many episodes, each from one query.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from agentrl_cli.errors import NotFound, nearest
from agentrl_cli.store.buffer import LiveEpisode
from agentrl_cli.store.codec import clean, decoding, marks
from agentrl_cli.store.episode_decode import read_episode, read_rows, read_turns
from agentrl_cli.store.episode_sql import PUT_GROUP
from agentrl_cli.store.file import Part, StoreFile, batches
from agentrl_cli.store.filters import compile_filter, compile_sort
from agentrl_cli.store.marks import RETIRED, Signals
from agentrl_cli.store.rows import EpisodeRow
from agentrl_cli.types import AgentState, Episode, Fact, Outcome, Tokens, Turn

CANDIDATES = 32
"""Episodes whose tokens are read to find the most pushed one."""
_ERRORS = ",".join(f"'{outcome}'" for outcome in Outcome if outcome.is_error)
_GRADED = f"reward IS NOT NULL AND outcome NOT IN ({_ERRORS})"
_PUSH = "abs(coalesce(advantage, 0))"
IN_USE = f"instr(replace(ifnull(group_id, ''), task_id, ''), '{RETIRED}')=0"
"""Condition of an episode that no other has replaced (`marks.retire`); a task's own name may have the mark."""
_NAMED = {
    "last": "1 ORDER BY outcome IS NULL",
    # If nothing was trained: the typical one of the equally good, without flags and not the only success of its group
    # (whose advantage is large).
    "best": f"{_GRADED} AND {IN_USE} ORDER BY reward DESC, flags NOT IN ('', '[]'), {_PUSH} = 0, {_PUSH}",
    # Of equally bad ones, the one that pushed the weights most.
    "worst": f"{_GRADED} AND {IN_USE} ORDER BY reward, {_PUSH} DESC",
}
"""Names of episodes: their condition and order; of equals the newest."""


class Episodes(Part):
    """Episodes with their turns, tokens, tool calls and rewards."""

    def add_group(
        self,
        run_id: str | None,
        group_id: str,
        task_id: str,
        step: int | None,
        why: str = "",
        *,
        pack: str = "",
    ) -> None:
        """Queue a group; its id is unique within its run, or within the store without a run.

        `why`: the reason for its task, empty if it was its turn. A stored group stays as it is; episodes add theirs.
        """
        self.file.write_later(
            PUT_GROUP, (group_id, run_id, task_id, step, time.time(), clean(why), pack)
        )

    def start(self, episode: Episode, *, split: str = "", tokenizer: str = "") -> None:
        """Queue an episode without outcome, and its `live` row; its turns come with `add_turn`.

        An unfinished episode with the same key is replaced.

        `split` and `tokenizer` (hash) default to those of the stored task and of the run.
        """
        started = episode.started or time.time()
        bare = episode.with_(
            started=started, outcome=None, turns=(), tokens=Tokens.empty(), reward_parts=()
        )
        with self.file.lock:
            self.file.require_writable()
            running = LiveEpisode(bare, split, tokenizer, (str(AgentState.PENDING), 0, "", started))
            if self.file.in_transaction:
                running.write(self.file.conn)
            else:
                self.file.buffer.episodes[episode.id] = running
                self.file.wake()

    def add_turn(self, episode_id: str, turn: Turn, tokens: Tokens, *, later: bool = False) -> None:
        """Commit a finished turn with its calls, results and tokens; `later`: with others, within `LINGER` seconds.

        Raises ValueError if span and tokens differ in length.
        """
        self._change(episode_id, lambda one: one.add(turn, tokens), later)

    def finish(
        self, episode: Episode, *, split: str = "", tokenizer: str = "", later: bool = False
    ) -> None:
        """Commit an episode's end: outcome, reward parts, counts, flags; delete its `live` row.

        Turns that are not stored, or whose span changed, are written too, so this alone stores a whole episode.
        `later`: as in `add_turn`. Raises ValueError for an episode without outcome.
        """
        if episode.outcome is None:
            raise ValueError(f"episode {episode.id} has no outcome")
        self._change(episode.id, lambda one: one.end(episode, split, tokenizer), later)

    def _change(self, episode_id: str, change: Callable[[LiveEpisode], None], later: bool) -> None:
        """Change an episode in the buffer, or at once in the file."""
        with self.file.lock:
            running = self.file.running(episode_id)
            if running is None:
                self.file.buffer.episodes.pop(episode_id, None)
                with self.file.transaction() as conn:
                    stored = LiveEpisode.load(conn, episode_id)
                    change(stored)
                    stored.inserted |= not stored.ended  # foreign keys refuse a turn of no episode
                    stored.write(conn)
                return
            change(running)
            self.file.wake()
            if not later:
                self.file.flush()
                self.file.buffer.raise_failure()

    def add(self, episodes: Iterable[Episode], *, split: str = "", tokenizer: str = "") -> None:
        """Commit whole finished episodes in one transaction."""
        with self.file.transaction():
            for episode in episodes:
                self.finish(episode, split=split, tokenizer=tokenizer)

    def cancel(self, run_id: str | None, error: str = "interrupted") -> int:
        """Set the outcome of a dead run's unfinished episodes to `cancelled`, and the fact of training episodes.

        Returns how many there were.
        """
        with self.file.transaction() as conn:
            count = conn.execute(
                "UPDATE episodes SET outcome=?, error=?, ended=?, fact=iif(kind='train', ?, fact)"
                " WHERE run_id IS ? AND outcome IS NULL",
                (Outcome.CANCELLED, error, time.time(), Fact.SKIPPED_CANCELLED, run_id),
            ).rowcount
            conn.execute("DELETE FROM live WHERE run_id IS ?", (run_id,))
        return count

    def discard(self, episode_id: str) -> None:
        """Delete an episode later, its unwritten part included."""
        with self.file.lock:
            self.file.buffer.episodes.pop(episode_id, None)
            self.file.write_later("DELETE FROM episodes WHERE id=?", (episode_id,))

    def delete(self, episode_ids: Iterable[str]) -> int:
        """Delete episodes and everything that belongs to them. Returns how many there were."""
        with self.file.transaction() as conn:
            return conn.executemany(
                "DELETE FROM episodes WHERE id=?", [(item,) for item in episode_ids]
            ).rowcount

    def ids(
        self,
        filter: str = "",
        sort: str = "-time",
        run: str | None = None,
        limit: int | None = None,
        *,
        replaced: bool = True,
    ) -> list[int]:
        """Return the rowids of the episodes that match, in order, at most `limit`; `replaced`: also those of before a
        change, in whose places a resume sampled others.

        Raises UsageError for an invalid filter or order, naming the nearest field.
        """
        where, params = compile_filter(filter)
        if not replaced:
            where = f"({where}) AND {IN_USE}"
        if run is not None:
            where, params = f"({where}) AND e.run_id=?", [*params, run]
        sql = f"SELECT e.rowid FROM episodes e WHERE {where} ORDER BY {compile_sort(sort)} LIMIT ?"
        return [row[0] for row in self.file.select(sql, [*params, -1 if limit is None else limit])]

    def used(
        self, filter: str, sort: str, run: str | None, limit: int | None = None
    ) -> list[EpisodeRow]:
        """Return list rows of the episodes that match, without those that others have replaced."""
        return self.rows(self.ids(filter, sort, run, limit, replaced=False))

    def rows(self, rowids: Sequence[int]) -> list[EpisodeRow]:
        """Return list rows of episodes, in the order given; deleted ones are left out."""
        found = {
            row.rowid: row
            for part in batches(rowids)
            for row in read_rows(self.file, f"rowid IN ({marks(len(part))})", part)
        }
        return [found[rowid] for rowid in rowids if rowid in found]

    def row(self, episode_id: str) -> EpisodeRow:
        """Return the list row of one episode. Raises NotFound naming the nearest."""
        rows = read_rows(self.file, "id=?", (episode_id,))
        return rows[0] if rows else read_rows(self.file, "id=?", (self.resolve(episode_id),))[0]

    def get(self, episode_id: str) -> Episode:
        """Return an episode as it was written, or as far as it got. Raises NotFound naming the nearest, StoreError."""
        line = self.row(episode_id)
        with decoding(f"Episode {line.id}"):
            return read_episode(self.file, line)

    def turns(self, episode_id: str) -> list[Turn]:
        """Return the turns of an episode, in order, with calls and results."""
        return read_turns(self.file, episode_id)

    def siblings(self, episode_id: str) -> list[EpisodeRow]:
        """Return all episodes of this one's group, itself included, by sample number; only itself without a group."""
        row = self.row(episode_id)
        if row.group_id is None:
            return [row]
        same = "group_id=? AND run_id IS ? AND parent_id IS ?"
        found = read_rows(self.file, same, (row.group_id, row.run_id, row.parent_id))
        return sorted(found, key=lambda item: (item.sample, item.rowid))

    def children(self, episode_id: str) -> list[EpisodeRow]:
        """Return the what-ifs of an episode, oldest first."""
        return read_rows(self.file, "parent_id=?", (episode_id,))

    def find_finished(self, run_id: str, step: int, kind: str = "train") -> dict[str, str]:
        """Return key → id of the finished episodes of a step: a resume reuses them."""
        sql = "SELECT key, id FROM episodes WHERE run_id=? AND step=? AND kind=? AND outcome IS NOT NULL ORDER BY rowid"
        return dict(self.file.select(sql, (run_id, step, kind)))

    def group_reason(self, group_id: str | None, run_id: str | None) -> str:
        """Return the reason why a group's task was picked; empty if it was its turn in the order."""
        sql = "SELECT why FROM groups WHERE id=? AND run_id IS ?"
        row = self.file.select_one(sql, (group_id, run_id))
        return str(row[0]) if row else ""

    def resolve(self, name: str, run: str | None = None) -> str:
        """Return the episode id for `last`, `best`, `worst`, an id or a unique prefix of one, also in a link
        `agentrl:ID@t2.31`.

        Raises NotFound naming the nearest.
        """
        scope, params = ("run_id=?", [run]) if run else ("1", [])
        name = name.removeprefix("agentrl:").split("@")[0].lower()
        if name == "best":  # the most pushed of the trained and solved ones with large advantages
            rows = self.file.select(
                f"SELECT id FROM episodes WHERE {scope} AND fact=? AND outcome=?"
                f" ORDER BY advantage DESC, started DESC LIMIT {CANDIDATES}",
                [*params, Fact.TRAINED, Outcome.SOLVED],
            )
            if best := Signals(self.file).most_pushed(row[0] for row in rows):
                return best
        if name in _NAMED:
            sql = f"SELECT id FROM episodes WHERE {scope} AND {_NAMED[name]}, started DESC LIMIT 1"
            if row := self.file.select_one(sql, params):
                return str(row[0])
            raise NotFound(
                f"No {name} episode yet in {self.file.path}.",
                hint="`agentrl rollout` makes some.",
            )
        found = self.file.select(
            "SELECT id FROM episodes WHERE id>=? AND id<? LIMIT 2", (name, name + "\U0010ffff")
        )
        if name and found and (len(found) == 1 or found[0][0] == name):
            return str(found[0][0])
        raise _no_episode(self.file, name, several=len(found) > 1)


def _no_episode(file: StoreFile, wanted: str, *, several: bool) -> NotFound:
    """Return NotFound with the nearest ids: those around it, as ids are ordered by time."""
    near = file.select("SELECT id FROM episodes WHERE id>=? ORDER BY id LIMIT 50", (wanted,))
    if several:
        ids = ", ".join(row[0] for row in near[:5] if row[0].startswith(wanted))
        return NotFound(
            f"{wanted!r} could be several episodes.", hint=f"Give more of the id: {ids}…"
        )
    near += file.select("SELECT id FROM episodes WHERE id<? ORDER BY id DESC LIMIT 50", (wanted,))
    runs = [name for (name,) in file.select("SELECT name FROM runs ORDER BY started DESC")]
    if run := next((name for name in runs if name.lower() == wanted), ""):
        shown = shlex.quote(run)
        hint = f"It is a run: `agentrl ls -r {shown}` lists its episodes, `agentrl export --report {shown}` reports."
        return NotFound(f"No episode named {wanted!r}.", hint=hint)
    hint = "`agentrl ls` lists them; last, best and worst work too."
    if alike := nearest(wanted, runs):
        hint += f" Runs of a similar name: {', '.join(alike)}."
    return NotFound.of("episode", wanted, [row[0] for row in near], hint=hint)


_RETIRED = (Fact.SKIPPED_CHANGED, Fact.SKIPPED_CHANGED.old, Fact.SKIPPED_CUT)


class Stats(Part):
    """Counts and means of episodes by group, task, tag and tool."""

    def group(self, group_id: str, run_id: str | None) -> tuple[int, float, float]:
        """Return the number of a group's graded episodes, mean and deviation of their rewards (NaN without any)."""
        sql = "SELECT reward FROM episodes WHERE group_id=? AND run_id IS ? AND reward IS NOT NULL"
        rewards = np.array(self.file.select(sql, (group_id, run_id)))
        if not len(rewards):
            return 0, math.nan, math.nan
        return len(rewards), float(rewards.mean()), float(rewards.std())

    def groups(
        self, run_id: str, step: int, kind: str = "train"
    ) -> list[tuple[str, str, str, int]]:
        """Return (group, pack, task, episodes that ended by themselves) of a run's groups after a step, by name."""
        sql = (
            "SELECT group_id, pack, task_id, count(*) FROM episodes WHERE run_id=? AND step>? AND kind=?"
            " AND outcome<>? AND fact NOT IN (?,?,?) AND group_id IS NOT NULL GROUP BY group_id ORDER BY group_id"
        )
        return self.file.select(sql, (run_id, step, kind, Outcome.CANCELLED, *_RETIRED))

    def task_results(self, run_id: str, until: int) -> list[tuple[str, str, int, int, int]]:
        """Return (pack, task, step, solved, graded) of a training's steps up to `until`."""
        return self.file.select(
            "SELECT pack, task_id, step, sum(outcome='solved'), count(*) FROM episodes WHERE run_id=? AND kind='train'"
            f" AND step<=? AND fact NOT IN (?,?,?) AND {_GRADED}"
            " GROUP BY step, pack, task_id ORDER BY step",
            (run_id, until, *_RETIRED),
        )

    def tasks(self, run: str | None = None) -> list[tuple[Any, ...]]:
        """Return (task, pack, family, split, episodes, mean reward, share solved) of every task that has episodes.

        The last two are over graded episodes, None without any. Replaced attempts are left out, as in `tools`.
        """
        return self.file.select(
            "SELECT task_id, pack, max(family), max(split), count(*), avg(reward),"
            " avg(CASE WHEN reward IS NOT NULL THEN outcome='solved' END) FROM episodes"
            f" WHERE (?1 IS NULL OR run_id=?1) AND {IN_USE} GROUP BY pack, task_id ORDER BY pack, task_id",
            (run,),
        )

    def episodes(self, run: str | None = None) -> dict[str, int]:
        """Return run id → number of episodes, from an index alone; only of `run` if given."""
        where = "run_id IS NOT NULL" if run is None else "run_id=?"
        sql = f"SELECT run_id, count(*) FROM episodes WHERE {where} GROUP BY run_id"
        return dict(self.file.select(sql, () if run is None else (run,)))

    def tags(self, run: str | None = None) -> dict[str, int]:
        """Return tag → number of episodes with it."""
        sql = (
            "SELECT tag, count(*) FROM tags t JOIN episodes e ON e.id=t.episode_id"
            " WHERE ?1 IS NULL OR e.run_id=?1 GROUP BY tag ORDER BY tag"
        )
        return dict(self.file.select(sql, (run,)))

    def tools(self, run: str | None = None, since: int = 0) -> list[tuple[Any, ...]]:
        """Return (tool, calls, malformed, failed, mean seconds, slowest, kinds of error) from step `since`.

        The busiest come first. A malformed call never ran; a failed one did, or was refused. One without a readable
        name is `(unreadable)`.
        """
        return self.file.select(
            "SELECT CASE WHEN c.name='' THEN '(unreadable)' ELSE c.name END, count(*), sum(c.call_error IS NOT NULL),"
            " sum(c.call_error IS NULL AND c.result_error IS NOT NULL), avg(c.seconds), max(c.seconds),"
            " group_concat(DISTINCT c.result_error)"
            " FROM tool_calls c JOIN episodes e ON e.id=c.episode_id"
            f" WHERE (?1 IS NULL OR e.run_id=?1) AND ifnull(e.step, 0)>=?2 AND {IN_USE} GROUP BY 1 ORDER BY 2 DESC",
            (run, since),
        )
