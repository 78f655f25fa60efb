"""The modes of failure of a run: a rule names the action of each failed attempt that no solved one took.

A rule looks at the attempt's end (an error, a limit), then at the first act where it leaves the solved attempt at the
same task with which it shares most acts; if none solved the task, at the acts that solved others of its family.
Attempts with the same words are one mode. No model judges, so the same store has the same map. Three statements read
the store, and no token array is decoded.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.rollout.flags import CALLED_WRONGLY, short
from agentrl_cli.store import Store
from agentrl_cli.store.episodes import IN_USE
from agentrl_cli.store.queries import message_lines

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


_EPISODES = f"""SELECT id, pack || ':' || task_id, coalesce(family, ''), coalesce(step, 0), outcome,
 coalesce(error, ''), flags FROM episodes
 WHERE run_id=? AND outcome != 'ungraded' AND kind=? AND {IN_USE} ORDER BY step, rowid"""
_OF_RUN = "episode_id IN (SELECT id FROM episodes WHERE run_id=? AND kind=?)"
_CALLS = f"""SELECT episode_id, turn, name, coalesce(arguments, raw),
 CASE WHEN result_error IS NOT NULL THEN result_error WHEN call_error IS NULL THEN ''
 WHEN arguments IS NULL THEN 'malformed_call' WHEN call_error LIKE '%unknown tool "%' THEN 'unknown_tool'
 ELSE 'bad_arguments' END, coalesce(nullif(result, ''), call_error, '')
 FROM tool_calls WHERE {_OF_RUN} ORDER BY episode_id, turn, idx"""
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


MASKED = ("env_error", "sandbox_error", "agent_error", "timeout", "drift", "foreign_text")
"""Outcomes that are not the model's: they are masked, and are shown by their error."""
LIMITS = {
    "truncated_tokens": "is cut off at the token limit",
    "truncated_turns": "has not answered after the last turn",
    "too_long": "does not begin: the prompt is too long",
    "cancelled": "was cancelled",
}
_AROUND = re.compile(r"^(?:Bad|Malformed) tool call: |\s*Expected: .*|(?<=\w\w[.;]) .*")
"""The words around the first sentence of an error, or its first part; `1.` ends no sentence."""
_PARTICULARS = (
    (re.compile(r"""(["'“`]).*?(?:\1|”)"""), "…"),
    (re.compile(r"\b0x[0-9a-f]+\b|(?<![A-Za-z])\d(?:[\d.,:]*\d)?"), "N"),
    (re.compile(r"(/[\w.-]+){2,}"), "PATH"),
)
"""What differs from one error to the next of the same kind."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt: its mode, the act that shows it, and how siblings from there fared."""

    attempt: Attempt
    mode: str
    act: int
    """The fork: the first act that a solved attempt did otherwise; 0 if none is known."""
    siblings: int
    """Other attempts at the task with the same acts before that one."""
    recovered: int
    """How many of them solved it."""

    @property
    def turn(self) -> int:
        acts = self.attempt.acts
        return acts[min(self.act, len(acts) - 1)].turn if acts else 0


@dataclass(frozen=True, slots=True)
class Mode:
    """Failures with the same words."""

    text: str
    failures: Sequence[Failure]
    share: float
    """Of all failed attempts."""
    course: tuple[float, float] | None
    """Share of all attempts that fail so, in the first and last third of the steps; None for fewer than three."""

    @property
    def examples(self) -> list[Failure]:
        """The first and the newest."""
        return [self.failures[0], self.failures[-1]][: len(self.failures)]

    @property
    def recovery(self) -> tuple[int, int]:
        """Solved siblings from the forks, and siblings: what sampling again from there would recover."""
        return sum(one.recovered for one in self.failures), sum(
            one.siblings for one in self.failures
        )

    def as_json(self) -> dict[str, Any]:
        """Return the mode as plain values."""
        solved, siblings = self.recovery
        early, late = self.course or (None, None)
        return {
            "mode": self.text,
            "count": len(self.failures),
            "share": self.share,
            "first_third": early,
            "last_third": late,
            "siblings": siblings,
            "recovered": solved,
            "examples": [{"episode": one.attempt.id, "turn": one.turn} for one in self.examples],
        }


def find_modes(attempts: Sequence[Attempt]) -> list[Mode]:
    """Return the modes of the failed attempts, the most frequent first."""
    by_task: defaultdict[str, list[Attempt]] = defaultdict(list)
    patterns: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for one in attempts:
        by_task[one.task].append(one)
        if one.solved:
            names = _names(one, answered=True)
            patterns[one.family][names] += 1
            patterns[""][names] += 1
    usual = {family: found.most_common(1)[0][0] for family, found in patterns.items()}
    modes: defaultdict[str, list[Failure]] = defaultdict(list)
    for one in attempts:
        if not one.solved:
            failure = _explain(one, by_task[one.task], usual.get(one.family) or usual.get("", ()))
            modes[failure.mode].append(failure)
    failed = sum(map(len, modes.values()))
    thirds = _thirds(attempts)
    return [
        Mode(text, found, len(found) / failed, _course(found, thirds))
        for text, found in sorted(modes.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _explain(one: Attempt, task: Sequence[Attempt], usual: tuple[str, ...]) -> Failure:
    solved = [other for other in task if other.solved]
    nearest = max(solved, key=one.shared, default=None)
    fork = one.shared(nearest) if nearest is not None else 0
    before = [act.key for act in one.acts[:fork]]
    siblings = [
        other
        for other in task
        if other is not one and [act.key for act in other.acts[:fork]] == before
    ]
    mode = _end(one) or _difference(one, nearest, fork, usual)
    return Failure(one, mode, fork, len(siblings), sum(other.solved for other in siblings))


def _end(one: Attempt) -> str:
    """Return the words for an attempt whose end says why it failed, else ""."""
    if one.outcome in MASKED:
        return _add_error(f"ended by {one.outcome}", one.error)
    calls = [act for act in one.acts if act.name != ANSWER]
    last = calls[-1] if calls else None
    if last is not None and last.error:
        if last.error in ("exception", "timeout", "memory"):
            return _add_error(f"{last.name} fails ({last.error})", last.result)
        if last.error == "unknown_tool":
            return "calls a tool that does not exist"
        if not last.name or last.error == "malformed_call":
            return _add_error("writes a call that cannot be read", last.result)
        return _add_error(f"{last.name} refuses the call ({last.error})", last.result)
    if len(calls) > 2 and len({act.key for act in calls[-3:]}) == 1:
        return f"repeats the same call of {calls[-1].name}"
    return LIMITS.get(one.outcome, "")


def _difference(one: Attempt, solved: Attempt | None, fork: int, usual: tuple[str, ...]) -> str:
    """Return the words for the first act that differs from those that solve the task, or tasks of the family."""
    mine = _names(one)
    theirs = _names(solved, answered=True) if solved is not None else usual
    if not theirs:
        return f"no attempt at such a task is solved; it goes {' → '.join(mine) or 'nowhere'}"
    if mine != theirs:
        place = next(
            (n for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(mine), len(theirs)),
        )
        did, should = (names[place] if place < len(names) else "" for names in (mine, theirs))
        if did == ANSWER:
            return (
                f"answers without calling {should}"
                if place == 0
                else f"answers before it calls {should}"
            )
        if should == ANSWER or not should:
            return f"calls {did or 'nothing'} where it should answer"
        return f"calls {did} where {should} is right" if did else f"ends before it calls {should}"
    result = next((act.result for act in reversed(one.acts) if act.name != ANSWER), None)
    answer = one.acts[-1].arguments if one.acts else ""
    if result is None:
        return "answers otherwise than the solved attempts"
    if result.strip() and result.strip() not in answer and one.acts[-1].name == ANSWER:
        return f"answers otherwise than {_last_tool(mine)} says"
    if solved is not None and fork < len(one.acts) and one.acts[fork].name != ANSWER:
        return f"calls {one.acts[fork].name} with another {_parameters(one, solved, fork)}"
    return f"calls {_last_tool(mine)} with other arguments"


def _parameters(one: Attempt, solved: Attempt, fork: int) -> str:
    """Return the names of the parameters in which two calls of a tool differ."""
    mine, theirs = (_loads(attempt.acts[fork].arguments) for attempt in (one, solved))
    names = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
    return " and ".join(names) or "argument"


def _loads(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _names(one: Attempt, *, answered: bool = False) -> tuple[str, ...]:
    """Return the names of its acts, or of those that reached a tool; the same several times in a row counts once."""
    refused = {"malformed_call", *CALLED_WRONGLY} if answered else ()
    names = [act.name for act in one.acts if act.error not in refused]
    return tuple(name for n, name in enumerate(names) if not n or name != names[n - 1])


def _last_tool(names: Sequence[str]) -> str:
    return next((name for name in reversed(names) if name != ANSWER), "the tool")


def _add_error(text: str, error: str) -> str:
    return ": ".join(filter(None, (text, generalise(error))))


def generalise(text: str) -> str:
    """Return the first sentence of an error without what differs between errors of the same kind."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")[:400]
    for pattern, word in _PARTICULARS:
        line = pattern.sub(word, line)
    return short(_AROUND.sub("", line).rstrip(".;"))


def _thirds(attempts: Sequence[Attempt]) -> tuple[set[str], ...]:
    """Return the ids of the attempts in the first and in the last third of the steps; () for fewer than three."""
    steps = sorted({one.step for one in attempts})
    if (width := len(steps) // 3) == 0:
        return ()
    first, last = set(steps[:width]), set(steps[-width:])
    return (
        {one.id for one in attempts if one.step in first},
        {one.id for one in attempts if one.step in last},
    )


def _course(found: Sequence[Failure], thirds: tuple[set[str], ...]) -> tuple[float, float] | None:
    if not thirds:
        return None
    early, late = (
        sum(one.attempt.id in third for one in found) / max(1, len(third)) for third in thirds
    )
    return early, late
