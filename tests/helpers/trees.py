"""Hand-made episodes whose turns form a tree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl_cli.types import (
    ROOT,
    Episode,
    Float32,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    Turn,
)

ORIGINS = {
    "system": Origin.SYSTEM,
    "user": Origin.USER,
    "tool": Origin.TOOL,
    "assistant": Origin.MODEL,
}


@dataclass(frozen=True)
class Said:
    """A turn to be: who, its ids, the turn that it continues (None: the one before)."""

    role: str
    ids: Sequence[int]
    parent: int | None = None


def fork() -> list[Said]:
    """A fork at turn 2: the same call was answered twice, and both answers were continued."""
    return [
        Said("user", (10, 11, 12)),
        Said("assistant", (20, 21)),
        Said("tool", (30,)),
        Said("assistant", (22, 23, 24)),
        Said("tool", (31, 32), parent=1),
        Said("assistant", (25,)),
    ]


def sub_agent() -> list[Said]:
    """An agent that asks a second one, with a prompt of its own, and continues with its answer."""
    return [
        Said("user", (10, 11, 12)),
        Said("assistant", (20, 21)),
        Said("user", (40, 41), parent=ROOT),
        Said("assistant", (26, 27)),
        Said("tool", (33,), parent=1),
        Said("assistant", (28, 29)),
    ]


def three_leaves() -> list[Said]:
    """Three answers: two to the same prompt, and one that forked after the first of them was continued."""
    return [
        Said("user", (10, 11, 12)),
        Said("assistant", (20, 21)),
        Said("user", (13,)),
        Said("assistant", (22,)),
        Said("user", (14, 15), parent=1),
        Said("assistant", (23, 24)),
        Said("assistant", (25,), parent=0),
    ]


def chain() -> list[Said]:
    return [
        Said("user", (10, 11, 12)),
        Said("assistant", (20, 21)),
        Said("tool", (30,)),
        Said("assistant", (22, 23, 24)),
        Said("tool", (31, 32)),
        Said("assistant", (25,)),
    ]


def episode(
    said: Sequence[Said], name: str = "e", reward: float = 1.0, logp: float = -1.5, **fields: Any
) -> Episode:
    """An episode of such turns; `logp` is that of every sampled token."""
    turns, parts, start = [], [], 0
    for index, one in enumerate(said):
        end = start + len(one.ids)
        sampled = one.role == "assistant"
        turns.append(
            Turn(
                index,
                one.role,
                ({"role": one.role, "content": f"turn {index}"},),
                start,
                end,
                stop_reason=StopReason.STOP if sampled else None,
                parent=one.parent,
            )
        )
        tokens = Tokens.from_ids(list(one.ids), [ORIGINS[one.role]] * len(one.ids))
        if sampled:
            known = np.full(len(one.ids), logp, np.float32)
            tokens = replace(tokens, logp_sampled=known, logp_policy=known.copy(), entropy=-known)
        parts.append(tokens)
        start = end
    given: dict[str, Any] = {
        "task_id": "t",
        "group_id": "g",
        "reward_parts": (RewardPart("r", reward, 1.0, True),),
        "outcome": Outcome.FAILED,
        **fields,
    }
    return Episode(name, turns=tuple(turns), tokens=Tokens.concat(parts), **given)


def with_logps(one: Episode, logps: Float32) -> Episode:
    values = np.full(len(one.tokens), np.nan, np.float32)
    values[one.tokens.trained_mask] = logps
    return one.with_(tokens=replace(one.tokens, logp_sampled=values, logp_policy=values.copy()))


def grafted(one: Episode, other: Episode, at: int, parent: int | None = None) -> Episode:
    """`one` with the turns of `other` from turn `at` on as a branch that continues turn `at - 1`, or `parent`."""
    turns, start = list(one.turns), len(one.tokens)
    for index, turn in enumerate(other.turns[at:]):
        end = start + turn.end - turn.start
        above = None if index else at - 1 if parent is None else parent
        turns.append(replace(turn, index=len(turns), start=start, end=end, parent=above))
        start = end
    rest = other.tokens.slice(other.turns[at].start, len(other.tokens))
    return one.with_(turns=tuple(turns), tokens=Tokens.concat([one.tokens, rest]))
