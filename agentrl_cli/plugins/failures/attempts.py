"""Attempts as a sequence of acts, read from the store by three statements: no token array is decoded."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl_cli.store.queries import message_lines

if TYPE_CHECKING:
    from agentrl_cli.store import Store

ANSWER = "answer"
"""The name of an act that calls no tool."""


@dataclass(frozen=True, slots=True)
class Act:
    """A call with its result, or the last answer."""

    turn: int
    name: str
    arguments: str
    """JSON as stored: keys in the order in which the model wrote them; the text of an answer or unreadable call."""
    error: str = ""
    """Class of error of the call or of its result."""
    result: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.arguments


@dataclass(frozen=True, slots=True)
class Attempt:
    """A graded episode, as far as its actions show its failure."""

    id: str
    task: str
    family: str
    step: int
    outcome: str
    error: str
    flags: tuple[str, ...]
    acts: tuple[Act, ...]

    @property
    def solved(self) -> bool:
        return self.outcome == "solved"

    def shared(self, other: Attempt) -> int:
        """Return the number of acts with which both begin."""
        pairs = zip(self.acts, other.acts, strict=False)
        return next(
            (n for n, (mine, theirs) in enumerate(pairs) if mine.key != theirs.key),
            min(len(self.acts), len(other.acts)),
        )


_EPISODES = """SELECT id, pack || ':' || task_id, coalesce(family, ''), coalesce(step, 0), outcome,
 coalesce(error, ''), flags FROM episodes
 WHERE run_id=? AND outcome != 'ungraded' AND kind=? ORDER BY step, rowid"""
_OF_RUN = "episode_id IN (SELECT id FROM episodes WHERE run_id=? AND kind=?)"
_CALLS = f"""SELECT episode_id, turn, name, coalesce(arguments, raw), coalesce(call_error, result_error, ''),
 coalesce(result, '') FROM tool_calls WHERE {_OF_RUN} ORDER BY episode_id, turn, idx"""
_LAST = f"""SELECT episode_id, max(idx), messages FROM turns WHERE role='assistant' AND {_OF_RUN}
 GROUP BY episode_id"""


def read_attempts(store: Store, run_id: str, kind: str) -> list[Attempt]:
    """Return the graded episodes of one kind (`train`, `eval` …) of a run, by step. Raises StoreError."""
    acts: defaultdict[str, list[Act]] = defaultdict(list)
    given = (run_id, kind)
    for episode, turn, name, arguments, error, result in store.select(_CALLS, given):
        acts[episode].append(Act(turn, name, arguments or "", error, result))
    for episode, turn, messages in store.select(_LAST, given):
        if not acts[episode] or acts[episode][-1].turn != turn:
            text = " ".join(message_lines(json.loads(messages)))
            acts[episode].append(Act(turn, ANSWER, text))
    return [
        Attempt(
            id,
            task,
            family,
            step,
            outcome,
            error,
            tuple(json.loads(flags or "[]")),
            tuple(acts[id]),
        )
        for id, task, family, step, outcome, error, flags in store.select(_EPISODES, given)
    ]
