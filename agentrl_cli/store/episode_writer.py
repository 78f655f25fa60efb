"""Writing episodes: started, turn by turn, finished.

An episode that was started here is kept in memory while it runs (running.py): what a rollout says of it `later` waits a
moment, so that one transaction writes what all episodes did meanwhile. Any other is written at once, by what the file
has of it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable

from agentrl_cli.store.base import StoreBase
from agentrl_cli.store.codec import clean, token_columns
from agentrl_cli.store.live_buffer import Running
from agentrl_cli.store.statements import (
    COUNT_TURN,
    END_EPISODE,
    PUT_CALL,
    PUT_EPISODE,
    PUT_GROUP,
    PUT_PART,
    PUT_RESULT,
    PUT_TOKENS,
    PUT_TURN,
    call_values,
    check_span,
    drop_turn,
    episode_values,
    part_values,
    result_values,
    turn_values,
)
from agentrl_cli.types import AgentState, Episode, Fact, Origin, Outcome, Tokens, Turn

MANY = 10_000
"""Groups that are remembered as added."""


class EpisodeWriter(StoreBase):
    """Episodes, turns, tool calls, rewards and tokens."""

    def add_group(self, run_id: str | None, group_id: str, task_id: str, step: int | None, why: str = "") -> None:
        """Queue a group; its id is unique within its run (in the whole store, where there is no run).

        `why` says what picked its task, where it was not simply its turn. One that is there already stays as it is.
        """
        if len(self._groups) > MANY:
            self._groups.clear()
        self._groups.add((run_id, group_id))
        self._later(PUT_GROUP, (group_id, run_id, task_id, step, time.time(), clean(why)))

    def start_episode(self, episode: Episode, *, split: str = "", tokenizer: str = "") -> None:
        """Queue an episode without outcome, and its `live` row. An unfinished one with the same key is replaced.
        Its turns come with `add_turn`.

        `split` and `tokenizer` (hash) default to those of the stored task and of the run.
        """
        started = episode.started or time.time()
        bare = episode
        if not episode.started or episode.outcome is not None or episode.turns or episode.reward_parts:
            bare = episode.with_(started=started, outcome=None, turns=(), tokens=Tokens.empty(), reward_parts=())
        with self._lock:
            self._refuse_readonly()
            if episode.group_id is not None and (episode.run_id, episode.group_id) not in self._groups:
                self.add_group(episode.run_id, episode.group_id, episode.task_id, episode.step)
            running = Running(bare, split, tokenizer, (str(AgentState.PENDING), 0, "", started))
            if self._depth:
                running.write(self._conn)
            else:
                self._running[episode.id] = running
                self._wake()

    def add_turn(self, episode_id: str, turn: Turn, tokens: Tokens, *, later: bool = False) -> None:
        """Commit a finished turn with its calls, results and tokens; `later`: within a moment (`LINGER`), with others.

        Raises ValueError where span and tokens differ.
        """
        with self._lock:
            self._refuse_readonly()
            running = self._running.get(episode_id)
            if running is None or self._depth:
                self._running.pop(episode_id, None)
                self._add_turn(episode_id, turn, tokens)
                return
            running.add(turn, tokens)
            self._wake()
            if not later:
                self.flush()
                self._raise_failure()

    def finish_episode(self, episode: Episode, *, split: str = "", tokenizer: str = "", later: bool = False) -> None:
        """Commit an episode's end: outcome, reward parts, counts, flags; its `live` row goes. `later`: as `add_turn`.

        Turns that were not written before (or whose span has changed since) are written now, so this alone stores a
        whole episode. Raises ValueError where it has no outcome.
        """
        if episode.outcome is None:
            raise ValueError(f"episode {episode.id} has no outcome")
        with self._lock:
            self._refuse_readonly()
            running = self._running.get(episode.id)
            if running is None or self._depth:
                self._running.pop(episode.id, None)
                self._finish(episode, split, tokenizer)
                return
            running.end(episode, split, tokenizer)
            self._wake()
            if not later:
                self.flush()
                self._raise_failure()

    def _add_turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        with self.transaction() as conn:
            known = conn.execute(
                "SELECT 1 FROM turns WHERE episode_id=? AND idx=?", (episode_id, turn.index)
            ).fetchone()
            self._put_turn(conn, episode_id, turn, tokens)
            if not known:
                model = int((tokens.origin == Origin.MODEL).sum())
                errors = sum(1 for result in turn.results if result.error)
                conn.execute(COUNT_TURN, (1, turn.end, model, len(turn.calls), errors, episode_id))

    def _finish(self, episode: Episode, split: str, tokenizer: str) -> None:
        """An episode of which only the file knows what there is."""
        with self.transaction() as conn:
            if episode.group_id is not None:
                conn.execute(
                    PUT_GROUP, (episode.group_id, episode.run_id, episode.task_id, episode.step, episode.started, "")
                )
            values = episode_values(episode, split, tokenizer)
            if not conn.execute(END_EPISODE, values).rowcount:
                conn.execute(PUT_EPISODE, values)
            spans = {
                row[0]: row[1:]
                for row in conn.execute(
                    "SELECT idx, token_start, token_end FROM turns WHERE episode_id=?", (episode.id,)
                )
            }
            for turn in episode.turns:
                if spans.pop(turn.index, None) != (turn.start, turn.end):
                    self._put_turn(conn, episode.id, turn, episode.tokens.slice(turn.start, turn.end))
            for index in spans:  # turns that were taken back
                drop_turn(conn, episode.id, index)
            conn.execute("DELETE FROM reward_parts WHERE episode_id=?", (episode.id,))
            conn.executemany(PUT_PART, part_values(episode.id, episode.reward_parts))
            conn.execute("DELETE FROM live WHERE episode_id=?", (episode.id,))

    def add_episodes(self, episodes: Iterable[Episode], *, split: str = "", tokenizer: str = "") -> None:
        """Commit whole finished episodes in one transaction: children of a what-if, imports, a chat."""
        with self.transaction():
            for episode in episodes:
                self.finish_episode(episode, split=split, tokenizer=tokenizer)

    def clear_live(self, run_id: str | None, error: str = "interrupted") -> int:
        """Give the unfinished episodes of a run that died the outcome `cancelled`, those of a training the fact, too.

        Returns how many there were.
        """
        with self.transaction() as conn:
            count = conn.execute(
                "UPDATE episodes SET outcome=?, error=?, ended=?, fact=iif(kind='train', ?, fact)"
                " WHERE run_id IS ? AND outcome IS NULL",
                (Outcome.CANCELLED, error, time.time(), Fact.SKIPPED_CANCELLED, run_id),
            ).rowcount
            conn.execute("DELETE FROM live WHERE run_id IS ?", (run_id,))
        return count

    def delete_episodes(self, episode_ids: Iterable[str]) -> int:
        """Delete episodes and all that belongs to them. Returns how many there were."""
        with self.transaction() as conn:
            return conn.executemany("DELETE FROM episodes WHERE id=?", [(item,) for item in episode_ids]).rowcount

    def _put_turn(self, conn: sqlite3.Connection, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        check_span(episode_id, turn, tokens)
        conn.execute(PUT_TURN, turn_values(episode_id, turn))
        conn.execute(PUT_TOKENS, (episode_id, turn.index, *token_columns(tokens)))
        if turn.calls:
            conn.execute("DELETE FROM tool_calls WHERE episode_id=? AND turn=?", (episode_id, turn.index))
            conn.executemany(
                PUT_CALL, [call_values(episode_id, turn.index, n, call) for n, call in enumerate(turn.calls)]
            )
        if turn.results:
            self._put_results(conn, episode_id, turn)

    def _put_results(self, conn: sqlite3.Connection, episode_id: str, turn: Turn) -> None:
        """Results go into the rows of the calls they answer: those of the last turn before that made any."""
        asked = conn.execute(
            "SELECT coalesce(max(turn), ?) FROM tool_calls WHERE episode_id=? AND turn<? AND call_id IS NOT NULL",
            (turn.index - 1, episode_id, turn.index),
        ).fetchone()[0]
        first = conn.execute(
            "SELECT count(*) FROM tool_calls WHERE episode_id=? AND turn=? AND result_turn<>?",
            (episode_id, asked, turn.index),
        ).fetchone()[0]
        for index, result in enumerate(turn.results):
            conn.execute(
                PUT_RESULT, (episode_id, asked, first + index, turn.index, index, *result_values(conn, result))
            )
