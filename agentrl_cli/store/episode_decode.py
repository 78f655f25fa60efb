"""Episodes from the rows of the tables: list rows, turns, whole episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl_cli.store.codec import load_metrics, loads, number, tokens_of
from agentrl_cli.store.file import StoreFile
from agentrl_cli.store.rows import EpisodeRow, build, columns
from agentrl_cli.types import (
    Episode,
    Outcome,
    RewardPart,
    StopReason,
    ToolCall,
    ToolResult,
    Turn,
    read_fact,
)

_COLUMNS = columns(EpisodeRow)[:-2]
_ROW = (
    f"SELECT {','.join(_COLUMNS)},"
    " (SELECT json_group_array(tag) FROM (SELECT tag FROM tags WHERE episode_id=episodes.id ORDER BY tag)),"
    " (SELECT text FROM notes WHERE episode_id=episodes.id) FROM episodes"
)
_TOKENS = "n, ids, origin, logp_sampled, logp_policy, entropy, top_ids, top_logps, support"
_TURNS = (
    "SELECT idx, role, messages, token_start, token_end, stop_reason, weights_version, started, seconds,"
    " reward, diverged, parent, player, images FROM turns WHERE episode_id=? ORDER BY idx"
)
_CALLS = (
    "SELECT turn, name, call_id, arguments, raw, call_error, result_turn, result, result_error, reward, metrics,"
    " seconds, level, truncated, done, images, result_value FROM tool_calls WHERE episode_id=? ORDER BY turn, idx"
)


def read_rows(file: StoreFile, where: str, params: Sequence[Any]) -> list[EpisodeRow]:
    """Return list rows of the episodes that match an SQL condition, by rowid."""
    outcome, flags, fact, tokenizer = (
        _COLUMNS.index(name) for name in ("outcome", "flags", "fact", "tokenizer")
    )
    return [
        build(
            EpisodeRow,
            row,
            outcome=None if row[outcome] is None else Outcome(row[outcome]),
            flags=tuple(loads(row[flags])) if row[flags] else (),
            fact=read_fact(row[fact]),
            tokenizer=row[tokenizer] or "",
            tags=tuple(loads(row[-2])),
            note=row[-1] or "",
        )
        for row in file.select(f"{_ROW} WHERE {where} ORDER BY rowid", params)
    ]


def read_episode(file: StoreFile, line: EpisodeRow) -> Episode:
    """Return the episode of a list row, or as far as it got."""
    tokens = file.select(
        f"SELECT {_TOKENS} FROM turn_tokens WHERE episode_id=? ORDER BY idx", (line.id,)
    )
    parts = file.select(
        "SELECT name, value, weight, is_primary, detail, fakeable FROM reward_parts WHERE episode_id=? ORDER BY idx",
        (line.id,),
    )
    return Episode(
        id=line.id,
        task_id=line.task_id,
        pack=line.pack,
        family=line.family,
        run_id=line.run_id,
        step=line.step,
        group_id=line.group_id,
        sample=line.sample,
        seed=line.seed,
        kind=line.kind,
        parent_id=line.parent_id,
        parent_turn=line.parent_turn,
        weights_version=line.weights_version,
        turns=tuple(read_turns(file, line.id)),
        tokens=tokens_of(tokens),
        reward_parts=tuple(
            RewardPart(name, number(value), number(weight), bool(primary), detail, bool(fakeable))
            for name, value, weight, primary, detail, fakeable in parts
        ),
        outcome=line.outcome,
        error=line.error,
        flags=line.flags,
        fact=line.fact,
        advantage=line.advantage,
        started=line.started,
        ended=line.ended,
    )


def read_turns(file: StoreFile, episode_id: str) -> list[Turn]:
    """Return the turns of an episode, in order, with calls and results."""
    calls: dict[int, list[ToolCall]] = {}
    results: dict[int, list[ToolResult]] = {}
    for row in file.select(_CALLS, (episode_id,)):
        turn, name, call_id, arguments, raw, error, answered = row[:7]
        if call_id is not None:
            calls.setdefault(turn, []).append(ToolCall(call_id, name, loads(arguments), raw, error))
        if answered is not None:
            text, failed, reward, metrics, seconds, level, truncated, done, images, value = row[7:]
            result = ToolResult(
                text=text,
                error=failed,
                reward=reward,
                metrics={} if metrics is None else load_metrics(metrics),
                images=_images(file, images),
                seconds=seconds,
                level=level,
                truncated=bool(truncated),
                done=bool(done),
                value=loads(value),
            )
            results.setdefault(answered, []).append(result)
    rows = file.select(_TURNS, (episode_id,))
    return [
        Turn(
            index=index,
            role=role,
            messages=tuple(loads(messages)),
            start=start,
            end=end,
            calls=tuple(calls.get(index, ())),
            results=tuple(results.get(index, ())),
            stop_reason=None if reason is None else StopReason(reason),
            weights_version=version,
            started=started,
            seconds=seconds,
            reward=reward,
            diverged=bool(diverged),
            parent=parent,
            player=player,
            images=_images(file, images),
        )
        for *row, images in rows
        for index, role, messages, start, end, reason, version, started, seconds, reward, diverged, parent, player in (
            row,
        )
    ]


def _images(file: StoreFile, hashes: str | None) -> tuple[bytes, ...]:
    return tuple(image_of(file, digest) for digest in loads(hashes) or ())


def image_of(file: StoreFile, digest: str) -> bytes:
    """Return the image of a hash; empty if it is not stored."""
    row = file.select_one("SELECT data FROM attachments WHERE hash=?", (digest,))
    return bytes(row[0]) if row else b""
