"""Writing episodes: started, turn by turn, finished. Each turn and each end is one short transaction; a prompt, which
costs nothing to make again, waits a moment together with its episode's start.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterable
from typing import Any

from agentrl_cli.store.base import StoreBase, marks
from agentrl_cli.store.codec import clean, dump_metrics, dumps, token_columns
from agentrl_cli.store.rows import EpisodeRow, columns
from agentrl_cli.types import AgentState, Episode, Fact, Origin, Outcome, Tokens, ToolResult, Turn
from agentrl_cli.types.content import media_type

_EPISODE_COLUMNS = tuple(name for name in columns(EpisodeRow) if name not in ("rowid", "tags", "note"))
_KEPT = {
    "id": "",
    "split": "iif(excluded.split='', split, excluded.split)",
    "tokenizer": "iif(excluded.tokenizer='', tokenizer, excluded.tokenizer)",
    "fact": "iif(excluded.fact='', fact, excluded.fact)",
    "advantage": "coalesce(excluded.advantage, advantage)",
}
_VALUE = dict.fromkeys(_EPISODE_COLUMNS, "?") | {
    "split": "coalesce(nullif(?,''), (SELECT split FROM tasks WHERE pack=? AND id=?), '')",
    "tokenizer": "coalesce(nullif(?,''), (SELECT tokenizer FROM runs WHERE id=?), '')",
}
_INDEXED = ("started", "step", "task_id", "run_id", "group_id", "parent_id", "key")
_SETS = ",".join(f"{column}={_KEPT.get(column, f'excluded.{column}')}" for column in _EPISODE_COLUMNS if column != "id")
_PUT_EPISODE = (
    f"INSERT INTO episodes ({','.join(_EPISODE_COLUMNS)}) VALUES ({','.join(_VALUE.values())})"
    f" ON CONFLICT (id) DO UPDATE SET {_SETS}"
)


def _end_episode() -> str:
    """`_PUT_EPISODE` for an episode that is there with the same indexed columns: SQLite writes the index entries of
    every column that is set anew, changed or not. Takes the same values."""
    places, count = {}, 0
    for column, value in _VALUE.items():
        pieces = value.split("?")
        places[column] = pieces[0] + "".join(f"?{count + n}{piece}" for n, piece in enumerate(pieces[1:], 1))
        count += len(pieces) - 1
    sets = [
        f"{column}={_KEPT.get(column, f'excluded.{column}').replace(f'excluded.{column}', place)}"
        for column, place in places.items()
        if column != "id" and column not in _INDEXED
    ]
    same = " AND ".join(f"{column} IS {places[column]}" for column in _INDEXED)
    return f"UPDATE episodes SET {','.join(sets)} WHERE id={places['id']} AND {same}"


_END_EPISODE = _end_episode()
_PUT_GROUP = "INSERT OR IGNORE INTO groups (id, run_id, task_id, step, at, why) VALUES (?,?,?,?,?,?)"
_PUT_LIVE = "INSERT OR REPLACE INTO live VALUES (?,?,?,?,?,?,?)"
_DROP_UNFINISHED = "DELETE FROM episodes WHERE key=? AND kind=? AND outcome IS NULL AND id<>?"
_PUT_TURN = f"INSERT OR REPLACE INTO turns VALUES ({marks(12)})"
_PUT_TOKENS = (
    "INSERT OR REPLACE INTO turn_tokens"
    " (episode_id, idx, n, ids, origin, logp_sampled, logp_policy, entropy, top_ids, top_logps)"
    f" VALUES ({marks(10)})"
)
_PUT_CALL = (
    "INSERT INTO tool_calls (episode_id, turn, idx, name, call_id, arguments, raw, call_error) VALUES (?,?,?,?,?,?,?,?)"
)
_ANSWER = ("result_turn", "result_idx", "result", "result_error", "reward", "metrics")
_RESULT = (*_ANSWER, "seconds", "level", "truncated", "done", "images")
_PUT_RESULT = (
    f"INSERT INTO tool_calls (episode_id, turn, idx, {','.join(_RESULT)}) VALUES ({marks(3 + len(_RESULT))})"
    f" ON CONFLICT DO UPDATE SET {','.join(f'{column}=excluded.{column}' for column in _RESULT)}"
)
_COUNT_TURN = (
    "UPDATE episodes SET n_turns=n_turns+?, n_tokens=max(n_tokens,?), n_model_tokens=n_model_tokens+?,"
    " n_calls=n_calls+?, n_tool_errors=n_tool_errors+? WHERE id=? AND outcome IS NULL"
)


class EpisodeWriter(StoreBase):
    """Episodes, turns, tool calls, rewards and tokens."""

    def add_group(self, run_id: str | None, group_id: str, task_id: str, step: int | None, why: str = "") -> None:
        """Queue a group; its id is unique within its run (in the whole store, where there is no run).

        `why` says what picked its task, where it was not simply its turn. One that is there already stays as it is.
        """
        self._later(_PUT_GROUP, (group_id, run_id, task_id, step, time.time(), clean(why)))

    def start_episode(self, episode: Episode, *, split: str = "", tokenizer: str = "") -> None:
        """Queue an episode without outcome, and its `live` row. An unfinished one with the same key is replaced.
        Its turns come with `add_turn`.

        `split` and `tokenizer` (hash) default to those of the stored task and of the run.
        """
        key = episode_key(episode)
        started = episode.started or time.time()
        if key is not None:
            self._later(_DROP_UNFINISHED, (key, episode.kind, episode.id))
        if episode.group_id is not None:
            self.add_group(episode.run_id, episode.group_id, episode.task_id, episode.step)
        bare = episode.with_(started=started, outcome=None, turns=(), tokens=Tokens.empty(), reward_parts=())
        self._later(_PUT_EPISODE, _episode_values(bare, split, tokenizer))
        self._later(_PUT_LIVE, (episode.id, episode.run_id, AgentState.PENDING, 0, "", started, started))

    def add_prompt(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        """Queue a turn of an episode that has just been started: one that nobody sampled and no tool answered.

        Raises ValueError where span and tokens differ.
        """
        _check_span(episode_id, turn, tokens)
        with self._lock:
            self._later(_PUT_TURN, _turn_values(episode_id, turn))
            self._later(_PUT_TOKENS, (episode_id, turn.index, *token_columns(tokens)))
            self._later(_COUNT_TURN, (1, turn.end, 0, 0, 0, episode_id))

    def add_turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        """Commit a finished turn with its calls, results and tokens. Raises ValueError where span and tokens differ."""
        with self.transaction() as conn:
            known = conn.execute(
                "SELECT 1 FROM turns WHERE episode_id=? AND idx=?", (episode_id, turn.index)
            ).fetchone()
            self._put_turn(conn, episode_id, turn, tokens)
            if not known:
                model = int((tokens.origin == Origin.MODEL).sum())
                errors = sum(1 for result in turn.results if result.error)
                conn.execute(_COUNT_TURN, (1, turn.end, model, len(turn.calls), errors, episode_id))

    def finish_episode(self, episode: Episode, *, split: str = "", tokenizer: str = "") -> None:
        """Commit an episode's end: outcome, reward parts, counts, flags; its `live` row goes.

        Turns that were not written before (or whose span has changed since) are written now, so this alone stores a
        whole episode. Raises ValueError where it has no outcome.
        """
        if episode.outcome is None:
            raise ValueError(f"episode {episode.id} has no outcome")
        with self.transaction() as conn:
            if episode.group_id is not None:
                conn.execute(
                    _PUT_GROUP, (episode.group_id, episode.run_id, episode.task_id, episode.step, episode.started, "")
                )
            values = _episode_values(episode, split, tokenizer)
            if not conn.execute(_END_EPISODE, values).rowcount:
                conn.execute(_PUT_EPISODE, values)
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
                _drop_turn(conn, episode.id, index)
            conn.execute("DELETE FROM reward_parts WHERE episode_id=?", (episode.id,))
            conn.executemany(
                "INSERT INTO reward_parts VALUES (?,?,?,?,?,?,?,?)",
                [
                    (
                        *(episode.id, index, part.name, part.value, part.weight, part.primary, clean(part.detail)),
                        part.fakeable,
                    )
                    for index, part in enumerate(episode.reward_parts)
                ],
            )
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
        _check_span(episode_id, turn, tokens)
        conn.execute(_PUT_TURN, _turn_values(episode_id, turn))
        conn.execute(_PUT_TOKENS, (episode_id, turn.index, *token_columns(tokens)))
        if turn.calls:
            conn.execute("DELETE FROM tool_calls WHERE episode_id=? AND turn=?", (episode_id, turn.index))
            conn.executemany(
                _PUT_CALL,
                [
                    (
                        episode_id,
                        turn.index,
                        index,
                        clean(call.name),
                        call.id,
                        None if call.arguments is None else dumps(call.arguments),
                        clean(call.raw),
                        None if call.error is None else clean(call.error),
                    )
                    for index, call in enumerate(turn.calls)
                ],
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
                _PUT_RESULT, (episode_id, asked, first + index, turn.index, index, *_result_values(conn, result))
            )


def _check_span(episode_id: str, turn: Turn, tokens: Tokens) -> None:
    if turn.end - turn.start != len(tokens):
        raise ValueError(
            f"turn {turn.index} of episode {episode_id} spans {turn.start}..{turn.end} but has {len(tokens)} tokens"
        )


def _turn_values(episode_id: str, turn: Turn) -> tuple[Any, ...]:
    return (
        episode_id,
        turn.index,
        turn.role,
        turn.start,
        turn.end,
        turn.stop_reason,
        turn.weights_version,
        turn.started,
        turn.seconds,
        dumps(turn.messages),
        turn.reward,
        turn.diverged,
    )


def _drop_turn(conn: sqlite3.Connection, episode_id: str, index: int) -> None:
    for table in ("turns", "turn_tokens"):
        conn.execute(f"DELETE FROM {table} WHERE episode_id=? AND idx=?", (episode_id, index))
    conn.execute("DELETE FROM tool_calls WHERE episode_id=? AND turn=?", (episode_id, index))
    gone = ",".join(f"{column}=NULL" for column in _RESULT)
    conn.execute(f"UPDATE tool_calls SET {gone} WHERE episode_id=? AND result_turn=?", (episode_id, index))


def _result_values(conn: sqlite3.Connection, result: ToolResult) -> tuple[Any, ...]:
    images = []
    for image in result.images:
        digest = hashlib.sha256(image).hexdigest()
        conn.execute("INSERT OR IGNORE INTO attachments VALUES (?,?,?)", (digest, media_type(image), image))
        images.append(digest)
    return (
        clean(result.text),
        None if result.error is None else clean(result.error),
        result.reward,
        dump_metrics(result.metrics) if result.metrics else None,
        result.seconds,
        result.level,
        result.truncated,
        result.done,
        dumps(images) if images else None,
    )


def _episode_values(episode: Episode, split: str, tokenizer: str) -> tuple[Any, ...]:
    """The values of `_PUT_EPISODE`, in the order of EpisodeRow's fields."""
    finished = episode.outcome is not None
    levels = sorted({result.level for turn in episode.turns for result in turn.results if result.level})
    return (
        episode.id,
        episode.run_id,
        episode.group_id,
        episode.task_id,
        episode.pack,
        episode.family,
        split,
        episode.pack,
        episode.task_id,
        episode.step,
        episode.sample,
        episode.seed,
        episode.kind,
        episode.parent_id,
        episode.parent_turn,
        episode.weights_version,
        tokenizer,
        episode.run_id,
        episode.outcome,
        clean(episode.error),
        float(episode.reward) if finished else None,
        episode.primary,
        episode.advantage,
        episode.fact,
        len(episode.turns),
        len(episode.tokens),
        episode.trained_tokens,
        episode.tool_calls,
        episode.tool_errors,
        ",".join(levels),
        dumps(episode.flags) if episode.flags else "",
        episode.started,
        episode.ended,
        episode_key(episode),
    )


def episode_key(episode: Episode) -> str | None:
    """`run/step/group/sample`: the same attempt after a resume has the same key. None outside a run's steps."""
    if episode.run_id is None or episode.step is None:
        return None
    return f"{episode.run_id}/{episode.step}/{episode.group_id or episode.task_id}/{episode.sample}"
