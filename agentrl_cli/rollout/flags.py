"""Flags: reasons to look at an episode, each with its evidence. Pure functions over an `Episode`.

TOOLFAIL   a tool raised, or took too long
BADARG     a tool was unknown or got arguments that do not fit its schema
NOTOOL     tools were offered, and none was called
LOOP       the same call again and again, or a text that repeats itself
TRUNC      cut off: tokens, turns or the context ran out
AFTERERR   answered right after a tool had failed
MALFORMED  a call that could not be parsed
DRIFT      a rendering of the conversation differs in its structure from the ids
DIVERGED   continues a stored episode, and a call of it, or the user, answered differently when run again
MASK       the mask is wrong: sampled tokens outside the model's turns, or without a log-probability

To add one: a generator function here and one line in RULES.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from agentrl_cli.rewards.context import answer_turns
from agentrl_cli.types import (
    Episode,
    Fact,
    Int32,
    Origin,
    Outcome,
    StopReason,
    ToolCall,
    ToolResult,
    Turn,
)

LOOP_CALLS = 3
"""Identical calls in one episode that make a loop; two in a row with the same answer do, too."""

LOOP_PERIOD = 32
"""Longest repeated piece of text looked for, in tokens."""

LOOP_TOKENS = 32
"""A turn that ends in so many tokens of repetition (four rounds at least) loops."""

TOOL_FAULTS = {"exception", "timeout", "memory"}
"""Errors of a call that fit its schema: the tool failed, whatever it was asked."""
CALLED_WRONGLY = {"bad_arguments", "unknown_tool"}
"""Errors of a call that could be read and reached no tool."""
_CUT = {
    Outcome.TRUNCATED_TOKENS: "it ran out of tokens",
    Outcome.TRUNCATED_TURNS: "it ran out of turns",
    Outcome.TOO_LONG: "its prompt does not fit",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """A rule that holds, the words that show it, and the turn where it shows."""

    name: str
    evidence: str
    turn: int | None = None


def find_flags(
    episode: Episode, drift: Iterable[str] = (), offered: bool | None = None
) -> list[Flag]:
    """Return all flags of an episode, each name once (its first place), in the order of RULES.

    `drift` names the kinds of drift that were found in it. `offered`: whether it was offered tools; None: as its own
    flags have it, which were found when it ended.
    """
    offered = "NOTOOL" in episode.flags if offered is None else offered
    rules = (rule for name, rule in RULES.items() if offered or name != "NOTOOL")
    found = [next(rule(episode), None) for rule in rules]
    if "structural" in set(drift) or episode.fact == Fact.SKIPPED_DRIFT:
        found.append(Flag("DRIFT", "a separator, role or stop token is missing in the rendering"))
    return [flag for flag in found if flag is not None]


def flag_names(
    episode: Episode, drift: Iterable[str] = (), offered: bool = True
) -> tuple[str, ...]:
    """Return the names alone, as `Episode.flags` holds them."""
    return tuple(flag.name for flag in find_flags(episode, drift, offered))


def pair_results(episode: Episode) -> Iterator[tuple[Turn, ToolCall | None, ToolResult]]:
    """Yield every result with the call it answers and the turn that asked, the nearest on its path."""
    states: list[tuple[Turn | None, int]] = []
    """After each turn the last one with calls, and how many of them are answered."""
    for turn, parent in zip(episode.turns, episode.parents, strict=True):
        asked, answers = (turn, 0) if turn.calls else states[parent] if parent >= 0 else (None, 0)
        for result in turn.results:
            known = asked is not None and answers < len(asked.calls)
            yield (
                asked or turn,
                asked.calls[answers] if asked is not None and known else None,
                result,
            )
            answers += 1
        states.append((asked, answers))


def _by_branch(rule: Callable[[Episode], Iterator[Flag]]) -> Callable[[Episode], Iterator[Flag]]:
    """Return a rule about what follows what, over each branch as an episode of its own."""

    def over_branches(episode: Episode) -> Iterator[Flag]:
        for branch in episode.sequences:
            for flag in rule(episode.chain(branch)):
                yield flag if flag.turn is None else replace(flag, turn=branch.turns[flag.turn])

    return over_branches


def _failed_calls(flag: str, errors: set[str], said: str, episode: Episode) -> Iterator[Flag]:
    """Yield a flag for calls that have one of some errors; `said` has places for {name}, {count} and {text}."""
    failed = [item for item in pair_results(episode) if item[2].error in errors]
    names = [call.name if call else "a tool" for _, call, _ in failed]
    for name, (turn, _, result) in zip(names, failed, strict=True):
        text = said.format(name=name, count=names.count(name), text=short(result.text))
        yield Flag(flag, text, turn.index)


def _no_tool(episode: Episode) -> Iterator[Flag]:
    replies = answer_turns(episode.turns)
    if replies and not episode.tool_calls:
        yield Flag("NOTOOL", "it answered without calling a tool", replies[-1].index)


def _loop(episode: Episode) -> Iterator[Flag]:
    counts: Counter[str] = Counter()
    last: tuple[str, str] | None = None
    for turn, call, result in pair_results(episode):
        if call is None:
            continue
        given = json.dumps(call.arguments, sort_keys=True, default=str)
        same = f"{call.name} {call.raw if call.arguments is None else given}"
        counts[same] += 1
        if counts[same] == LOOP_CALLS or last == (same, result.text):
            yield Flag("LOOP", f"the same call {counts[same]}×: {short(same)}", turn.index)
        last = (same, result.text)
    for turn in episode.turns:
        if turn.role == "assistant" and turn.end - turn.start >= LOOP_TOKENS:
            length, period = repetition(episode.tokens.ids[turn.start : turn.end])
            if length:
                yield Flag("LOOP", f"its last {length} tokens repeat the same {period}", turn.index)


def repetition(ids: Int32, most: int = LOOP_PERIOD) -> tuple[int, int]:
    """(length, period) of the repetition that `ids` end in, stop tokens aside; (0, 0) if there is none."""
    for end in (len(ids), len(ids) - 1):
        tail = ids[:end]
        for period in range(1, min(most, end // 4) + 1):
            differs = np.flatnonzero(tail[period:] != tail[:-period])
            length = end - (int(differs[-1]) + 1 if len(differs) else 0)
            if length >= max(LOOP_TOKENS, 4 * period):
                return length, period
    return 0, 0


def _check_truncation(episode: Episode) -> Iterator[Flag]:
    if episode.outcome in _CUT:
        yield Flag(
            "TRUNC", _CUT[episode.outcome], episode.turns[-1].index if episode.turns else None
        )
    for turn in episode.turns:
        if turn.stop_reason is StopReason.LENGTH:
            yield Flag(
                "TRUNC",
                f"turn {turn.index} was cut after {turn.end - turn.start} tokens",
                turn.index,
            )


def _after_error(episode: Episode) -> Iterator[Flag]:
    failed: ToolResult | None = None
    for turn in episode.turns:
        if turn.results:
            failed = next((result for result in reversed(turn.results) if result.error), None)
        elif turn.role == "assistant":
            if failed is not None and not turn.calls:
                yield Flag(
                    "AFTERERR",
                    f"it answered although its call failed: {short(failed.text)}",
                    turn.index,
                )
            failed = None


def _check_parsing(episode: Episode) -> Iterator[Flag]:
    for turn in episode.turns:
        for call in turn.calls:
            if call.error:
                yield Flag("MALFORMED", short(call.error), turn.index)
    for turn, _, result in pair_results(episode):
        if result.error == "malformed_call":
            yield Flag("MALFORMED", short(result.text), turn.index)


def _mask(episode: Episode) -> Iterator[Flag]:
    tokens = episode.tokens
    sampled = tokens.origin == Origin.MODEL
    for turn in episode.turns:
        count = int(sampled[turn.start : turn.end].sum())
        if turn.role != "assistant" and count:
            yield Flag("MASK", f"{count} tokens of a {turn.role} turn count as sampled", turn.index)
    bare = np.flatnonzero(sampled & np.isnan(tokens.logp_policy))
    if len(bare):
        text = f"{len(bare)} sampled tokens without a log-probability, first at {bare[0]}"
        places = (turn.index for turn in episode.turns if turn.start <= bare[0] < turn.end)
        yield Flag("MASK", text, next(places, None))


def _check_divergence(episode: Episode) -> Iterator[Flag]:
    for number, (turn, call, result) in enumerate(pair_results(episode), 1):
        if result.metrics.get("diverged"):
            name = call.name if call else "a tool"
            yield Flag(
                "DIVERGED",
                f"diverged at call {number} ({name}): run again, it answered otherwise",
                turn.index,
            )
    for turn in episode.turns:
        if turn.diverged:
            said = (
                f"the {turn.role} said otherwise"
                if turn.role != "assistant"
                else "it was answered, not so before"
            )
            yield Flag("DIVERGED", f"diverged at turn {turn.index}: run again, {said}", turn.index)


RULES: dict[str, Callable[[Episode], Iterator[Flag]]] = {
    "TOOLFAIL": partial(_failed_calls, "TOOLFAIL", TOOL_FAULTS, "{name} failed {count}×: {text}"),
    "BADARG": partial(
        _failed_calls,
        "BADARG",
        CALLED_WRONGLY,
        "{name} was called wrongly {count}×: {text}",
    ),
    "NOTOOL": _no_tool,
    "LOOP": _by_branch(_loop),
    "TRUNC": _check_truncation,
    "AFTERERR": _by_branch(_after_error),
    "MALFORMED": _check_parsing,
    "DIVERGED": _check_divergence,
    "MASK": _mask,
}


def short(text: str, most: int = 80) -> str:
    """Return a text in one line, cut to a length."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
