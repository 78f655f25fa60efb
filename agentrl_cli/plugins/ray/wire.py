"""Serialise the episodes that workers send, in the codec of the store.

A turn is packed as its columns: JSON for messages and arguments, blobs for the numbers per token. What comes out is
what the store would return, so an episode of a worker equals one that was made here and read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from agentrl_cli.store.codec import (
    dump_metrics,
    dumps,
    load_metrics,
    loads,
    token_columns,
    tokens_of,
)
from agentrl_cli.types import (
    Episode,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)

Packed = tuple[Any, ...]
"""Plain values: text, numbers, bytes, None, and tuples of these."""

_TURN = "index role start end weights_version started seconds reward diverged parent images".split()
_BULK = {"turns", "tokens", "reward_parts", "outcome"}
_HEAD = tuple(field.name for field in fields(Episode) if field.name not in _BULK)


def pack_turn(turn: Turn, tokens: Tokens) -> Packed:
    """Return a turn and its tokens."""
    calls = tuple(
        (
            call.id,
            call.name,
            None if call.arguments is None else dumps(call.arguments),
            call.raw,
            call.error,
        )
        for call in turn.calls
    )
    reason = None if turn.stop_reason is None else str(turn.stop_reason)
    plain = tuple(getattr(turn, name) for name in _TURN)
    results = tuple(_pack_result(result) for result in turn.results)
    return (plain, reason, dumps(turn.messages), calls, results, token_columns(tokens))


def unpack_turn(packed: Packed) -> tuple[Turn, Tokens]:
    """Return the turn and the tokens that `pack_turn` packed."""
    plain, reason, messages, calls, results, columns = packed
    turn = Turn(
        **dict(zip(_TURN, plain, strict=True)),
        messages=tuple(loads(messages)),
        calls=tuple(
            ToolCall(id_, name, loads(given), raw, error) for id_, name, given, raw, error in calls
        ),
        results=tuple(_unpack_result(result) for result in results),
        stop_reason=None if reason is None else StopReason(reason),
    )
    return turn, tokens_of([columns])


def pack_head(episode: Episode) -> Packed:
    """Return an episode without its turns and tokens."""
    parts = tuple(
        (part.name, float(part.value), float(part.weight), part.primary, part.detail, part.fakeable)
        for part in episode.reward_parts
    )
    outcome = None if episode.outcome is None else str(episode.outcome)
    return (tuple(getattr(episode, name) for name in _HEAD), outcome, parts)


def unpack_head(packed: Packed, turns: Sequence[tuple[Turn, Tokens]] = ()) -> Episode:
    """Return the episode of a packed head with these turns."""
    plain, outcome, parts = packed
    return Episode(
        **dict(zip(_HEAD, plain, strict=True)),
        outcome=None if outcome is None else Outcome(outcome),
        reward_parts=tuple(RewardPart(*part) for part in parts),
        turns=tuple(turn for turn, _ in turns),
        tokens=Tokens.concat([tokens for _, tokens in turns]),
    )


_RESULT = ("text", "error", "reward", "images", "seconds", "level", "truncated", "done")


def _pack_result(result: ToolResult) -> Packed:
    return (
        dump_metrics(result.metrics) if result.metrics else None,
        *(getattr(result, name) for name in _RESULT),
    )


def _unpack_result(packed: Packed) -> ToolResult:
    metrics, *plain = packed
    found = ToolResult(**dict(zip(_RESULT, plain, strict=True)))
    return found if metrics is None else replace(found, metrics=load_metrics(metrics))
