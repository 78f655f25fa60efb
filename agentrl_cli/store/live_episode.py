"""A running episode in memory: its unwritten part, and how that is written.

Changes of a running episode wait for a moment (`write_buffer.LINGER`) and are then written with all others in one
transaction. An episode that ends before that is written once and whole: no row is inserted only to be updated right
after. Nothing about an episode that is kept here has to be looked up in the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl_cli.store.codec import clean, token_columns
from agentrl_cli.store.episode_sql import (
    DROP_UNFINISHED,
    END_EPISODE,
    NAME_TOKENIZER,
    NO_RESULT,
    PUT_DRIFT,
    PUT_LIVE,
    PUT_PART,
    PUT_RESULT,
    PUT_TOKENS,
    PUT_TURN,
    PUT_WHOLE_CALL,
    SET_COUNTS,
    call_values,
    check_span,
    drop_turn,
    episode_key,
    episode_values,
    part_values,
    put_episode,
    result_values,
    turn_values,
)
from agentrl_cli.types import Episode, Origin, Tokens, Turn

_MODEL = int(Origin.MODEL)

TEXT_TAIL = 4000
"""Characters of the generated text that `live` keeps for watchers."""


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
        check_span(self.episode.id, turn, tokens)
        self.spans[turn.index] = (turn.start, turn.end)
        self.parents[turn.index] = turn.index - 1 if turn.parent is None else turn.parent
        self.waiting[turn.index] = (turn, tokens)
        if turn.calls and turn.index not in self.calling:
            self.calling.append(turn.index)
        if turn.results:
            asked = next(
                (index for index in self._path(turn) if index in self.calling), turn.index - 1
            )
            before = [
                end
                for index, (asked_, end) in self.answers.items()
                if asked_ == asked and index != turn.index
            ]
            self.answers[turn.index] = (asked, max(before, default=0) + len(turn.results))

    def _path(self, turn: Turn) -> Iterator[int]:
        """Yield the turns before a turn on its branch, nearest first."""
        index = turn.index
        while index in self.parents and self.parents[index] < index:
            index = self.parents[index]
            yield index

    def end(self, episode: Episode, split: str, tokenizer: str) -> None:
        """Keep the finished episode. Turns that changed or were never buffered are taken from it."""
        for turn in episode.turns:
            if self.spans.get(turn.index) != (turn.start, turn.end):
                self.add(turn, episode.tokens.slice(turn.start, turn.end))
        if (self.episode.fact and not episode.fact) or (
            self.episode.advantage is not None is episode.advantage
        ):
            old = self.episode
            kept = old.advantage if episode.advantage is None else episode.advantage
            episode = episode.with_(fact=episode.fact or old.fact, advantage=kept)
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
                sampled += int(np.count_nonzero(part.origin == _MODEL))
                errors += sum(1 for result in turn.results if result.error)
        return turns, tokens, sampled, calls, errors

    # Writing

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
        put_episode(conn, episode, self.split, values)

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
        for index in self.spans.keys() - {
            turn.index for turn in episode.turns
        }:  # turns that were rolled back
            drop_turn(conn, episode.id, index)
        if self.inserted:  # an episode may end a second time, with other rewards
            for table in ("live", "reward_parts"):
                conn.execute(f"DELETE FROM {table} WHERE episode_id=?", (episode.id,))
        conn.executemany(PUT_PART, part_values(episode.id, episode.reward_parts))
