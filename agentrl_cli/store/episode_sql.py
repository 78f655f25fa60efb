"""The statements that write episodes, and their parameters."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl_cli.store.codec import clean, dump_metrics, dumps, marks
from agentrl_cli.store.rows import EpisodeRow, columns
from agentrl_cli.types import Episode, Origin, ToolCall, ToolResult, Turn
from agentrl_cli.types.content import HASH, digest, media_type

EPISODE_COLUMNS = tuple(
    name for name in columns(EpisodeRow) if name not in ("rowid", "tags", "note")
)
_KEPT = {
    "id": "",
    "split": "iif(excluded.split='', split, excluded.split)",
    "tokenizer": "coalesce(excluded.tokenizer, tokenizer)",
    "fact": "iif(excluded.fact='', fact, excluded.fact)",
    "advantage": "coalesce(excluded.advantage, advantage)",
}
_VALUE = dict.fromkeys(EPISODE_COLUMNS, "?") | {
    "split": "coalesce(nullif(?,''), (SELECT split FROM tasks WHERE pack=? AND id=?), '')",
    "tokenizer": "coalesce(nullif(?,''), (SELECT tokenizer FROM runs WHERE id=?))",
    "parent_id": "(SELECT id FROM episodes WHERE id=?)",  # it may have been deleted
}
_INDEXED = ("started", "step", "task_id", "pack", "run_id", "group_id", "parent_id", "key")
PUT_EPISODE = (
    f"INSERT INTO episodes ({','.join(EPISODE_COLUMNS)}) VALUES ({','.join(_VALUE.values())})"
    " ON CONFLICT (id) DO UPDATE SET "
) + ",".join(
    f"{column}={_KEPT.get(column, f'excluded.{column}')}"
    for column in EPISODE_COLUMNS
    if column != "id"
)


def _end_episode() -> str:
    """`PUT_EPISODE` for a stored episode with the same indexed columns, with the same parameters.

    SQLite rewrites the index entries of every column that is set, changed or not, and checks its foreign keys, so this
    statement sets none of them.
    """
    places, count = {}, 0
    for column, value in _VALUE.items():
        pieces = value.split("?")
        places[column] = pieces[0] + "".join(
            f"?{count + n}{piece}" for n, piece in enumerate(pieces[1:], 1)
        )
        count += len(pieces) - 1
    sets = [
        f"{column}={_KEPT.get(column, f'excluded.{column}').replace(f'excluded.{column}', place)}"
        for column, place in places.items()
        if column != "id" and column not in _INDEXED
    ]
    same = " AND ".join(f"{column} IS {places[column]}" for column in _INDEXED)
    return f"UPDATE episodes SET {','.join(sets)} WHERE id={places['id']} AND {same}"


END_EPISODE = _end_episode()
PUT_GROUP = (
    "INSERT OR IGNORE INTO groups (id, run_id, task_id, step, at, why, pack)"
    " VALUES (?1,?2,?3,?4,?5,?6, (SELECT pack FROM tasks WHERE pack=?7 AND id=?3))"
)
NAME_TOKENIZER = "INSERT OR IGNORE INTO tokenizers VALUES (?, x'', '', '{}')"
"""Adds a hash that a run or an episode names before the tokenizer itself is stored."""
# For a task whose row is unknown.
NAME_TASK = (
    "INSERT OR IGNORE INTO tasks (pack, id, family, split, prompt, data)"
    " VALUES (?,?,?,?,'[]','null')"
)
PUT_LIVE = "INSERT OR REPLACE INTO live VALUES (?,?,?,?,?,?,?)"
DROP_UNFINISHED = "DELETE FROM episodes WHERE key=? AND kind=? AND outcome IS NULL AND id<>?"
PUT_TURN = (
    "INSERT OR REPLACE INTO turns (episode_id, idx, role, token_start, token_end, stop_reason, weights_version,"
    f" started, seconds, messages, reward, diverged, parent, images, player) VALUES ({marks(15)})"
)
PUT_TOKENS = (
    "INSERT OR REPLACE INTO turn_tokens"
    " (episode_id, idx, n, ids, origin, logp_sampled, logp_policy, entropy, top_ids, top_logps, support)"
    f" VALUES ({marks(11)})"
)
_ANSWER = ("result_turn", "result_idx", "result", "result_error", "reward", "metrics")
RESULT = (*_ANSWER, "seconds", "level", "truncated", "done", "images", "result_value")
PUT_RESULT = (
    f"INSERT INTO tool_calls (episode_id, turn, idx, {','.join(RESULT)}) VALUES ({marks(3 + len(RESULT))})"
    f" ON CONFLICT DO UPDATE SET {','.join(f'{column}=excluded.{column}' for column in RESULT)}"
)
PUT_WHOLE_CALL = (
    "INSERT INTO tool_calls (episode_id, turn, idx, name, call_id, arguments, raw, call_error,"
    f" {','.join(RESULT)}) VALUES ({marks(8 + len(RESULT))})"
)
NO_RESULT = (None,) * len(RESULT)
DROP_RESULTS = (
    f"UPDATE tool_calls SET {','.join(f'{column}=NULL' for column in RESULT)}"
    " WHERE episode_id=? AND result_turn=?"
)
DROP_IMAGES = (
    "DELETE FROM attachments WHERE hash NOT IN"
    " (SELECT value FROM tool_calls, json_each(tool_calls.images) WHERE images IS NOT NULL"
    " UNION SELECT value FROM turns, json_each(turns.images) WHERE images IS NOT NULL"
    f" UNION SELECT substr(atom, {len(HASH) + 1}) FROM tasks, json_tree(prompt) WHERE atom LIKE '{HASH}%')"
)
"""Deletes the images that no turn, result or task refers to."""
PUT_PART = "INSERT INTO reward_parts VALUES (?,?,?,?,?,?,?,?)"
PUT_DRIFT = (
    "INSERT INTO drift (episode_id, kind, turn, position, expected, got) VALUES (?,?,?,?,?,?)"
)
SET_COUNTS = (
    "UPDATE episodes SET n_turns=?, n_tokens=?, n_model_tokens=?, n_calls=?, n_tool_errors=? WHERE id=?"
    " AND outcome IS NULL"
)


def put_images(conn: sqlite3.Connection, images: Sequence[bytes]) -> str | None:
    """Insert images, each once. Returns their hashes as JSON; None if there are none."""
    hashes = [digest(image) for image in images]
    rows = [(name, media_type(image), image) for name, image in zip(hashes, images, strict=True)]
    conn.executemany("INSERT OR IGNORE INTO attachments VALUES (?,?,?)", rows)
    return dumps(hashes) if hashes else None


def turn_values(conn: sqlite3.Connection, episode_id: str, turn: Turn) -> tuple[Any, ...]:
    """Parameters of `PUT_TURN`. Inserts the turn's images."""
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
        turn.parent,
        put_images(conn, turn.images),
        turn.player,
    )


def call_values(episode_id: str, turn: int, index: int, call: ToolCall) -> tuple[Any, ...]:
    """Parameters of `PUT_WHOLE_CALL`, without those of the result."""
    return (
        episode_id,
        turn,
        index,
        clean(call.name),
        call.id,
        None if call.arguments is None else dumps(call.arguments),
        clean(call.raw),
        None if call.error is None else clean(call.error),
    )


def result_values(conn: sqlite3.Connection, result: ToolResult) -> tuple[Any, ...]:
    """Return the values of `RESULT` but its turn and index. Inserts the result's images."""
    return (
        clean(result.text),
        None if result.error is None else clean(result.error),
        result.reward,
        dump_metrics(result.metrics) if result.metrics else None,
        result.seconds,
        result.level,
        result.truncated,
        result.done,
        put_images(conn, result.images),
        None
        if result.value is None
        else clean(json.dumps(result.value, ensure_ascii=False, default=str)),
    )


def episode_values(
    episode: Episode, split: str, tokenizer: str, counts: Sequence[int] | None = None
) -> tuple[Any, ...]:
    """Parameters of `PUT_EPISODE`, in the order of EpisodeRow's fields.

    `counts`: turns, tokens, sampled tokens, calls and failed calls, if the episode itself does not have them yet.
    """
    finished = episode.outcome is not None
    if counts is None:
        sampled = int(np.count_nonzero(episode.tokens.origin == Origin.MODEL))
        lengths = len(episode.turns), len(episode.tokens), sampled
        counts = (*lengths, episode.tool_calls, episode.tool_errors)
    levels = sorted(
        {result.level for turn in episode.turns for result in turn.results if result.level}
    )
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
        None if not finished or episode.reward is None else float(episode.reward),
        episode.primary,
        episode.advantage,
        episode.fact,
        *counts,
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
