"""A conversation that another program recorded, and the episode that it becomes.

Its token ids are those of the bundled tokenizer and never trained: they are there so that the screens have text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from typing import Any

from agentrl_cli.chat.tokenizer import Tokenizer
from agentrl_cli.paths import bundled_model
from agentrl_cli.store.codec import dumps
from agentrl_cli.types import (
    ROOT,
    Episode,
    Message,
    Origin,
    Outcome,
    RewardPart,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)
from agentrl_cli.types.content import content_text

PACK = KIND = "import"
LONGEST = 100_000
"""Characters of a turn that the screens show."""
ORIGINS = {"system": Origin.SYSTEM, "user": Origin.USER, "tool": Origin.TOOL}
ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""Raised by a value that is not of the form that it seems to have."""
ABOUT = "source"
"""Key of an imported message for facts that its source has of it, or of the whole if it is the first one."""
UNANSWERED = "unanswered"
"""The error of a call whose answer is missing while a later one has its own."""
_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


@dataclass(slots=True)
class Said:
    """A message, when it was there, how long it took, and the error of a tool."""

    message: Message
    at: float = 0.0
    seconds: float = 0.0
    error: str | None = None
    model: str = ""
    player: str = ""
    """Name of the sub-agent that it is of."""
    about: dict[str, Any] = field(default_factory=dict)
    """Other facts of its source, such as its usage, which its message keeps under `ABOUT`."""


@dataclass(slots=True)
class Trace:
    """The conversations of one attempt: the main one first, then those of sub-agents and continuations."""

    source: Any
    """What it was read from: equal sources are one episode."""
    paths: list[list[Said]] = field(default_factory=list)
    agent: str = ""
    reward: float | None = None
    error: str = ""
    tools: Sequence[dict[str, Any]] = ()
    """OpenAI schemas of the tools that the model had."""

    def ask(self) -> str:
        """Return the text of the first user message."""
        said = (one.message for path in self.paths[:1] for one in path)
        return next((content_text(m.get("content")) for m in said if m["role"] == "user"), "")


def number_in(value: Any) -> float | None:
    """Return a JSON number or truth value as a float, infinity for an integer beyond it; None for anything else."""
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf


@cache
def tokenizer() -> Tokenizer:
    """Return the bundled tokenizer, whose ids stand for texts without ids."""
    return Tokenizer.load(bundled_model())


def short_hash(value: Any) -> str:
    """Return 14 letters and digits, the form of an episode's id, that follow from a value."""
    number = int.from_bytes(sha256(dumps(value).encode()).digest()[:9], "big")
    return "".join(_BASE32[(number >> shift) & 31] for shift in range(0, 70, 5))


def episode_of(trace: Trace) -> Episode:
    """Return the episode of a trace; conversations that begin alike share these turns."""
    turns: list[Turn] = []
    parts: list[Tokens] = []
    known: dict[tuple[int, str, str], int] = {}
    for path in trace.paths:
        parent = ROOT
        for role, group in group_by_role(path):
            key = (parent, group[0].player, dumps([one.message for one in group]))
            if key not in known:
                known[key] = len(turns)
                parts.append(encode_text(role, [one.message for one in group]))
                turns.append(_turn(len(turns), parent, role, group, turns, len(parts[-1])))
            parent = known[key]
    started = min((turn.started for turn in turns if turn.started), default=0.0)
    outcome = Outcome.UNGRADED if trace.reward is None else Outcome.FAILED
    outcome = Outcome.SOLVED if (trace.reward or 0) >= 1 else outcome
    rewards = () if trace.reward is None else (RewardPart("trace", trace.reward, primary=True),)
    return Episode(
        short_hash(trace.source),
        f"t-{short_hash(trace.ask())}",
        pack=PACK,
        family=trace.agent,
        kind=KIND,
        weights_version=next((turn.weights_version for turn in turns if turn.weights_version), ""),
        turns=tuple(turns),
        tokens=Tokens.concat(parts),
        reward_parts=rewards,
        outcome=Outcome.AGENT_ERROR if trace.error and trace.reward is None else outcome,
        error=trace.error,
        started=started,
        ended=max((turn.started + turn.seconds for turn in turns), default=0.0),
    )


def encode_text(role: str, messages: Iterable[Message]) -> Tokens:
    """Return a turn's text as tokens of the bundled tokenizer, which were not sampled."""
    ids = tokenizer().encode(_text(messages)[:LONGEST])
    return Tokens.from_ids(ids, [ORIGINS.get(role, Origin.FORCED)] * len(ids))


def group_by_role(path: Iterable[Said]) -> list[tuple[str, list[Said]]]:
    """Return each message with its role; answers of tools that follow each other are one turn."""
    groups: list[tuple[str, list[Said]]] = []
    for one in path:
        role = str(one.message["role"])
        if role == "tool" and groups and groups[-1][0] == role:
            groups[-1][1].append(one)
        else:
            groups.append((role, [one]))
    return groups


def _turn(
    index: int, parent: int, role: str, group: list[Said], turns: Sequence[Turn], count: int
) -> Turn:
    start = turns[-1].end if turns else 0
    messages = tuple(one.message | ({ABOUT: one.about} if one.about else {}) for one in group)
    turn = Turn(index, role, messages, start, start + count, parent=parent)
    first = group[0]
    turn = replace(turn, started=first.at, seconds=max(0.0, first.seconds), player=first.player)
    if parent == index - 1:
        turn = replace(turn, parent=None)
    if role == "assistant":
        return replace(turn, calls=calls_of(messages[0]), weights_version=group[0].model)
    if role != "tool":
        return turn
    asked = [call.id for call in turns[parent].calls] if parent >= 0 else []
    results = (
        ToolResult("", error=UNANSWERED)
        if one is None
        else ToolResult(
            content_text(one.message["content"]),
            error=one.error or ("error" if one.message.get("is_error") else None),
            seconds=one.seconds,
        )
        for one in in_order(asked, group)
    )
    return replace(turn, results=tuple(results))


def in_order(asked: Sequence[str], group: Sequence[Said]) -> list[Said | None]:
    """Return the answers to calls: by their ids, those without one in the gaps; None for a missing one.

    Those whose ids no call has come last, after an answer or a gap for each call.
    """
    named: dict[Any, Said] = {one.message.get("tool_call_id"): one for one in reversed(group)}
    known = [named.get(name) for name in dict.fromkeys(asked)]
    taken = {*map(id, known)}
    free = [one for one in group if id(one) not in taken]
    strange = [one for one in free if asked and one.message.get("tool_call_id")]
    left = (one for one in free if not (asked and one.message.get("tool_call_id")))
    found = [*[one or next(left, None) for one in known], *left, *strange]
    while found and found[-1] is None:
        del found[-1]
    return found


def calls_of(message: Message) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's message."""
    return tuple(
        ToolCall(
            call["id"],
            call["function"]["name"],
            call["function"]["arguments"],
            dumps(call["function"]),
            call.get("error"),
        )
        for call in message.get("tool_calls", ())
    )


def _text(messages: Iterable[Message]) -> str:
    """Return a turn's text for people: reasoning, content, calls."""
    found = []
    for message in messages:
        if reasoning := message.get("reasoning_content"):
            found.append(f"<think>\n{reasoning}\n</think>")
        found.append(content_text(message.get("content")))
        found += [
            f"<tool_call>\n{dumps(call['function'])}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
    return "\n".join(filter(None, found))


def say(error: BaseException) -> str:
    """Return one of `ERRORS` as a clause for a user."""
    if isinstance(error, KeyError):
        return f"it has no {str(error.args[0])[:40]!r}"
    if isinstance(error, ValueError):
        return str(error).split("\n", 1)[0].rstrip(".")
    return "a value in it is of a wrong type"


Note = Callable[[str], None]
"""Takes a sentence about a part that was left out."""


def tool_call(name: str, arguments: Any, id: str) -> dict[str, Any]:
    """Return a call as a message has it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
