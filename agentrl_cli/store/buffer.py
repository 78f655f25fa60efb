"""Writes that wait in memory: running episodes, and statements of logs, events and training signals.

Changes of a running episode wait for a moment (`LINGER`) and are then written with all others in one transaction. An
episode that ends before that is written once and whole: no row is inserted only to be updated right after. Nothing
about an episode that is kept here has to be looked up in the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.errors import StoreError
from agentrl_cli.store.codec import clean, token_columns
from agentrl_cli.store.episode_sql import (
    DROP_RESULTS,
    DROP_UNFINISHED,
    END_EPISODE,
    NAME_TASK,
    NAME_TOKENIZER,
    NO_RESULT,
    PUT_DRIFT,
    PUT_EPISODE,
    PUT_GROUP,
    PUT_LIVE,
    PUT_PART,
    PUT_RESULT,
    PUT_TOKENS,
    PUT_TURN,
    PUT_WHOLE_CALL,
    SET_COUNTS,
    call_values,
    episode_key,
    episode_values,
    result_values,
    turn_values,
)
from agentrl_cli.types import Episode, Origin, Tokens, Turn

LINGER = 0.8
"""Seconds that a write may wait."""
MAX_QUEUE = 50_000
"""Statements kept while the file cannot be written; beyond it the oldest are dropped."""
TEXT_TAIL = 4000
"""Characters of the generated text that `live` keeps for watchers."""
Params = Sequence[Any]


@dataclass(slots=True)
class LiveEpisode:
    """One running episode. `write` it within a transaction, and call `mark_written` once that is committed."""

    episode: Episode
    """As it started; once it has ended, as it ended."""
    split: str
    tokenizer: str
    state: tuple[str, int, str, float] | None
    """State, turn, text and time; None once they are written."""
    inserted: bool = False
    """Whether its row is in the file."""
    waiting: dict[int, tuple[Turn, Tokens]] = field(default_factory=dict)
    """The newest version of every turn that is not written."""
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Token start and end of every turn."""
    parents: dict[int, int] = field(default_factory=dict)
    """The turn that every turn continues; −1 for none."""
    drift: list[tuple[Any, ...]] = field(default_factory=list)
    """Parameters of `PUT_DRIFT` that are not written: drift decides what is trained, so it comes with the end."""
    calling: list[int] = field(default_factory=list)
    """Turns with tool calls."""
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Turn with results → (turn of the calls they answer, index after the last of these calls)."""
    stored: set[int] = field(default_factory=set)
    """Turns that are written."""
    counts: tuple[int, ...] = (0, 0, 0, 0, 0)
    """Turns, tokens, sampled tokens, calls and failed calls that are written."""

    @classmethod
    def load(cls, conn: sqlite3.Connection, episode_id: str) -> LiveEpisode:
        """Return an episode that is not buffered as far as it is in the file, to write more of it."""
        found = cls(Episode(episode_id, ""), "", "", None)
        sql = "SELECT n_turns, n_tokens, n_model_tokens, n_calls, n_tool_errors FROM episodes WHERE id=?"
        counts = conn.execute(sql, (episode_id,)).fetchone()
        if counts is None:
            return found
        found.inserted, found.counts = True, counts
        sql = "SELECT idx, token_start, token_end, coalesce(parent, idx - 1) FROM turns WHERE episode_id=?"
        for index, start, end, parent in conn.execute(sql, (episode_id,)):
            found.spans[index], found.parents[index] = (start, end), parent
        found.stored = set(found.spans)
        sql = "SELECT DISTINCT turn FROM tool_calls WHERE episode_id=? AND call_id IS NOT NULL"
        found.calling = [turn for (turn,) in conn.execute(sql, (episode_id,))]
        # SQLite takes the bare column `turn` from the row that has the maximum.
        sql = (
            "SELECT result_turn, turn, max(idx) + 1 FROM tool_calls WHERE episode_id=? AND result_turn IS NOT NULL"
            " GROUP BY result_turn"
        )
        found.answers = {row[0]: row[1:] for row in conn.execute(sql, (episode_id,))}
        return found

    @property
    def ended(self) -> bool:
        """Whether it has an outcome."""
        return self.episode.outcome is not None

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits to be written."""
        return (
            not self.inserted
            or self.ended
            or self.state is not None
            or bool(self.waiting or self.drift)
        )

    def add(self, turn: Turn, tokens: Tokens) -> None:
        """Add a turn, or a newer version of one. Raises ValueError if span and tokens differ in length."""
        if turn.end - turn.start != len(tokens):
            raise ValueError(
                f"turn {turn.index} of episode {self.episode.id} spans {turn.start}..{turn.end}"
                f" but has {len(tokens)} tokens"
            )
        self.spans[turn.index] = (turn.start, turn.end)
        self.parents[turn.index] = turn.index - 1 if turn.parent is None else turn.parent
        self.waiting[turn.index] = (turn, tokens)
        if turn.calls and turn.index not in self.calling:
            self.calling.append(turn.index)
        if turn.results:
            asked = self.parents[turn.index]  # the nearest turn with calls on its branch
            while asked not in self.calling and self.parents.get(asked, asked) < asked:
                asked = self.parents[asked]
            if asked not in self.calling:
                asked = turn.index - 1
            before = [
                end
                for index, (other, end) in self.answers.items()
                if other == asked and index != turn.index
            ]
            self.answers[turn.index] = (asked, max(before, default=0) + len(turn.results))

    def end(self, episode: Episode, split: str, tokenizer: str) -> None:
        """Keep the finished episode. Turns that changed or were never buffered are taken from it."""
        for turn in episode.turns:
            if self.spans.get(turn.index) != (turn.start, turn.end):
                self.add(turn, episode.tokens.slice(turn.start, turn.end))
        old = self.episode
        kept = old.advantage if episode.advantage is None else episode.advantage
        if (fact := episode.fact or old.fact) != episode.fact or kept is not episode.advantage:
            episode = episode.with_(fact=fact, advantage=kept)
        self.episode = episode
        self.split, self.tokenizer = split or self.split, tokenizer or self.tokenizer

    def mark_written(self) -> None:
        """Forget what waited: it is committed."""
        self.inserted, self.state, self.counts = True, None, self._count_all()
        self.stored.update(self.waiting)
        self.waiting.clear()
        self.drift.clear()

    def _count_all(self) -> tuple[int, ...]:
        """`counts` including what waits; a turn counts as it was when it was first written."""
        turns, tokens, sampled, calls, errors = self.counts
        for turn, part in self.waiting.values():
            if turn.index not in self.stored:
                turns, tokens, calls = turns + 1, max(tokens, turn.end), calls + len(turn.calls)
                sampled += int(np.count_nonzero(part.origin == int(Origin.MODEL)))
                errors += sum(1 for result in turn.results if result.error)
        return turns, tokens, sampled, calls, errors

    def write(self, conn: sqlite3.Connection) -> None:
        """Write what waits. Changes nothing in memory: the transaction may still fail."""
        episode, ended = self.episode, self.ended
        if ended or not self.inserted:
            self._put_row(conn)
        elif self.waiting:
            conn.execute(SET_COUNTS, (*self._count_all(), episode.id))
        if self.waiting:
            self._put_turns(conn)
        conn.executemany(PUT_DRIFT, self.drift)
        if ended:
            self._put_end(conn)
        elif self.state is not None:
            state, turn, text, at = self.state
            row = (
                episode.id,
                episode.run_id,
                state,
                turn,
                clean(text[-TEXT_TAIL:]),
                episode.started,
                at,
            )
            conn.execute(PUT_LIVE, row)

    def _put_row(self, conn: sqlite3.Connection) -> None:
        episode = self.episode
        values = episode_values(
            episode, self.split, self.tokenizer, None if self.ended else self._count_all()
        )
        if self.tokenizer:
            conn.execute(NAME_TOKENIZER, (self.tokenizer,))
        if self.inserted and conn.execute(END_EPISODE, values).rowcount:
            return
        key = episode_key(episode)
        if key is not None:
            conn.execute(DROP_UNFINISHED, (key, episode.kind, episode.id))
        pack, task, group = episode.pack, episode.task_id, episode.group_id
        conn.execute(NAME_TASK, (pack, task, episode.family, self.split))
        if group is not None:
            of = (group, episode.run_id, task, episode.step, episode.started, "", pack)
            conn.execute(PUT_GROUP, of)
        conn.execute(PUT_EPISODE, values)

    def _put_turns(self, conn: sqlite3.Connection) -> None:
        id_, waiting = self.episode.id, self.waiting.values()
        conn.executemany(PUT_TURN, [turn_values(conn, id_, turn) for turn, _ in waiting])
        conn.executemany(
            PUT_TOKENS, [(id_, turn.index, *token_columns(tokens)) for turn, tokens in waiting]
        )
        calls: dict[tuple[int, int], tuple[Any, ...]] = {}
        results: dict[tuple[int, int], tuple[Any, ...]] = {}
        for turn, _ in waiting:
            if turn.calls and turn.index in self.stored:
                conn.execute(
                    "DELETE FROM tool_calls WHERE episode_id=? AND turn=?", (id_, turn.index)
                )
            for index, call in enumerate(turn.calls):
                calls[turn.index, index] = call_values(id_, turn.index, index, call)
            for index, result in enumerate(turn.results):
                asked, end = self.answers[turn.index]
                place = (asked, end - len(turn.results) + index)
                results[place] = (turn.index, index, *result_values(conn, result))
        if calls:
            rows = [(*values, *results.pop(place, NO_RESULT)) for place, values in calls.items()]
            conn.executemany(PUT_WHOLE_CALL, rows)
        if results:
            conn.executemany(
                PUT_RESULT, [(id_, *place, *values) for place, values in results.items()]
            )

    def _put_end(self, conn: sqlite3.Connection) -> None:
        episode = self.episode
        # Turns that were rolled back go with their tokens and calls, and their results from the calls they answered.
        for index in self.spans.keys() - {turn.index for turn in episode.turns}:
            for table, column in (("turns", "idx"), ("turn_tokens", "idx"), ("tool_calls", "turn")):
                sql = f"DELETE FROM {table} WHERE episode_id=? AND {column}=?"
                conn.execute(sql, (episode.id, index))
            conn.execute(DROP_RESULTS, (episode.id, index))
        if self.inserted:  # an episode may end a second time, with other rewards
            for table in ("live", "reward_parts"):
                conn.execute(f"DELETE FROM {table} WHERE episode_id=?", (episode.id,))
        for index, part in enumerate(episode.reward_parts):
            scores = part.value, part.weight, part.primary
            rest = clean(part.detail), part.fakeable
            conn.execute(PUT_PART, (episode.id, index, part.name, *scores, *rest))


class WriteBuffer:
    """Writes that a store has accepted and not made. The store's lock guards it."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self.queue: list[tuple[str, Params]] = []
        self.episodes: dict[str, LiveEpisode] = {}
        """Episodes that were started by this store, by id."""
        self.failure: StoreError | None = None
        """An error from the background, which the next write raises."""
        self.refused: StoreError | None = None
        """The last row that SQLite refused, until it is raised."""

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits to be written."""
        return bool(self.queue) or any(one.is_waiting for one in self.episodes.values())

    @contextmanager
    def transaction(self, conn: sqlite3.Connection) -> Iterator[None]:
        """Yield a transaction that makes the waiting writes first. If it fails, all wait again.

        A bad row does not hold back the others.
        """
        from agentrl_cli.hooks.waits import waiting  # late: who only reads needs no asyncio

        kept = self.queue, dict(self.episodes)
        with waiting(f"the lock of {self.path}, which another process holds", moves=False):
            conn.execute("BEGIN IMMEDIATE")
        self.queue = []
        try:
            for sql, params in kept[0]:
                with self._note_refusal():
                    conn.execute(sql, params)
            written = [one for one in kept[1].values() if one.is_waiting]
            for one in written:
                with self._note_refusal(), savepoint(conn):
                    one.write(conn)
            yield
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            self.queue, self.episodes = kept
            del self.queue[:-MAX_QUEUE]
            raise
        for one in written:
            one.mark_written()
            if one.ended:
                self.episodes.pop(one.episode.id, None)

    def raise_failure(self) -> None:
        """Raise the error from the background, once."""
        if self.failure is not None:
            failure, self.failure, self.refused = self.failure, None, None
            raise failure

    @contextmanager
    def _note_refusal(self) -> Iterator[None]:
        try:
            yield
        except (
            sqlite3.IntegrityError,
            sqlite3.InterfaceError,
            sqlite3.ProgrammingError,
            OverflowError,
        ) as error:
            self.refused = self.failure = StoreError(f"A row was refused by {self.path}: {error}.")


@contextmanager
def savepoint(conn: sqlite3.Connection) -> Iterator[None]:
    """Yield a nested transaction: rolled back by itself if it fails and the outer one continues."""
    conn.execute("SAVEPOINT inner_write")
    try:
        yield
    except BaseException:
        if conn.in_transaction:  # a full disk has ended the whole transaction already
            conn.execute("ROLLBACK TO inner_write")
            conn.execute("RELEASE inner_write")
        raise
    conn.execute("RELEASE inner_write")
