"""Episodes that run, as a rollout makes them: what is known of each and not written yet, and how it is written.

What a running episode does waits in memory for a moment (`base.LINGER`), and is then written with that of all others in
one transaction. An episode that ends before that is written once and whole: no row is made only to be changed right
after. Of an episode that is kept here nothing has to be looked up in the file.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl_cli.store.codec import clean, token_columns
from agentrl_cli.store.statements import (
    DROP_UNFINISHED,
    END_EPISODE,
    NO_RESULT,
    PUT_DRIFT,
    PUT_EPISODE,
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
    result_values,
    turn_values,
)
from agentrl_cli.types import Episode, Origin, Tokens, Turn

_MODEL = int(Origin.MODEL)

SAID = 4000
"""Characters of what the model said that a watcher sees."""


@dataclass(slots=True)
class Running:
    """One episode. `write` it within a transaction, and say so by `written` once that is committed."""

    episode: Episode
    """As it began; once it has ended, as it ended."""
    split: str
    tokenizer: str
    state: tuple[str, int, str, float] | None
    """State, turn, text and time; None where they are written."""
    begun: bool = False
    """Whether its row is in the file."""
    waiting: dict[int, tuple[Turn, Tokens]] = field(default_factory=dict)
    """The newest version of every turn that is not written."""
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of all turns."""
    drift: list[tuple[Any, ...]] = field(default_factory=list)
    """Drift that is not written, as `PUT_DRIFT` takes it: it decides what is trained, so it comes with the end."""
    asking: list[int] = field(default_factory=list)
    """The turns that made calls."""
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The turns with results: the turn that they answer, and the number among its calls where they end."""
    stored: set[int] = field(default_factory=set)
    """The turns that are written."""
    counts: tuple[int, ...] = (0, 0, 0, 0, 0)
    """Turns, tokens, sampled tokens, calls and failed calls of what is written."""

    @property
    def ended(self) -> bool:
        """Whether it is known how it ended."""
        return self.episode.outcome is not None

    @property
    def waits(self) -> bool:
        """Whether there is anything to write."""
        return not self.begun or self.ended or self.state is not None or bool(self.waiting or self.drift)

    def add(self, turn: Turn, tokens: Tokens) -> None:
        """One more turn, or a newer version of one. Raises ValueError where span and tokens differ."""
        check_span(self.episode.id, turn, tokens)
        self.spans[turn.index] = (turn.start, turn.end)
        self.waiting[turn.index] = (turn, tokens)
        if turn.calls and turn.index not in self.asking:
            self.asking.append(turn.index)
        if turn.results:
            asked = max((index for index in self.asking if index < turn.index), default=turn.index - 1)
            before = [end for index, (asked_, end) in self.answers.items() if asked_ == asked and index != turn.index]
            self.answers[turn.index] = (asked, max(before, default=0) + len(turn.results))

    def end(self, episode: Episode, split: str, tokenizer: str) -> None:
        """How it ended. Turns that are another than they were, or that nobody told of, are taken from it."""
        for turn in episode.turns:
            if self.spans.get(turn.index) != (turn.start, turn.end):
                self.add(turn, episode.tokens.slice(turn.start, turn.end))
        if (self.episode.fact and not episode.fact) or (self.episode.advantage is not None is episode.advantage):
            old = self.episode
            kept = old.advantage if episode.advantage is None else episode.advantage
            episode = episode.with_(fact=episode.fact or old.fact, advantage=kept)
        self.episode = episode
        self.split, self.tokenizer = split or self.split, tokenizer or self.tokenizer

    def written(self) -> None:
        """All of it is committed."""
        self.begun, self.state, self.counts = True, None, self._counted()
        self.stored.update(self.waiting)
        self.waiting.clear()
        self.drift.clear()

    def _counted(self) -> tuple[int, ...]:
        """`counts` with what waits; a turn counts as it was when it was first written."""
        turns, tokens, sampled, calls, errors = self.counts
        for turn, part in self.waiting.values():
            if turn.index not in self.stored:
                turns, tokens, calls = turns + 1, max(tokens, turn.end), calls + len(turn.calls)
                sampled += int(np.count_nonzero(part.origin == _MODEL))
                errors += sum(1 for result in turn.results if result.error)
        return turns, tokens, sampled, calls, errors

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, conn: sqlite3.Connection) -> None:
        """Writes what waits. Nothing here changes by it: the transaction may still fail."""
        episode, ended = self.episode, self.ended
        if ended or not self.begun:
            self._put_row(conn)
        elif self.waiting:
            conn.execute(SET_COUNTS, (*self._counted(), episode.id))
        if self.waiting:
            self._put_turns(conn)
        conn.executemany(PUT_DRIFT, self.drift)
        if ended:
            self._put_end(conn)
        elif self.state is not None:
            state, turn, text, at = self.state
            row = (episode.id, episode.run_id, state, turn, clean(text[-SAID:]), episode.started, at)
            conn.execute(PUT_LIVE, row)

    def _put_row(self, conn: sqlite3.Connection) -> None:
        episode = self.episode
        values = episode_values(episode, self.split, self.tokenizer, None if self.ended else self._counted())
        if self.begun and conn.execute(END_EPISODE, values).rowcount:
            return
        key = episode_key(episode)
        if key is not None:
            conn.execute(DROP_UNFINISHED, (key, episode.kind, episode.id))
        conn.execute(PUT_EPISODE, values)

    def _put_turns(self, conn: sqlite3.Connection) -> None:
        id_, waiting = self.episode.id, self.waiting.values()
        conn.executemany(PUT_TURN, [turn_values(id_, turn) for turn, _ in waiting])
        conn.executemany(PUT_TOKENS, [(id_, turn.index, *token_columns(tokens)) for turn, tokens in waiting])
        calls: dict[tuple[int, int], tuple[Any, ...]] = {}
        results: dict[tuple[int, int], tuple[Any, ...]] = {}
        for turn, _ in waiting:
            if turn.calls and turn.index in self.stored:
                conn.execute("DELETE FROM tool_calls WHERE episode_id=? AND turn=?", (id_, turn.index))
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
            conn.executemany(PUT_RESULT, [(id_, *place, *values) for place, values in results.items()])

    def _put_end(self, conn: sqlite3.Connection) -> None:
        episode = self.episode
        for index in self.spans.keys() - {turn.index for turn in episode.turns}:  # turns that were taken back
            drop_turn(conn, episode.id, index)
        if self.begun:
            conn.execute("DELETE FROM live WHERE episode_id=?", (episode.id,))
        conn.executemany(PUT_PART, part_values(episode.id, episode.reward_parts))
