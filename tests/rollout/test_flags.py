"""Each rule with an episode that has it and one that has not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl_cli.rollout.flags import find_flags, flag_names, repetition
from agentrl_cli.types import (
    Episode,
    Origin,
    Outcome,
    StopReason,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)
from tests.helpers.trees import Said, grafted
from tests.helpers.trees import episode as said_episode


def call(**arguments: Any) -> ToolCall:
    return ToolCall("c", "calculator", arguments, str(arguments))


def episode(
    *steps: tuple[list[ToolCall], list[ToolResult]],
    ids: Sequence[int] = (1, 2, 3),
    stop_reason: StopReason = StopReason.STOP,
    **given: Any,
) -> Episode:
    """What the assistant says in each step is `ids`, and what the tools answer has two tokens."""
    said: list[Said] = []
    more: list[dict[str, Any]] = []
    for calls, results in steps:
        said.append(Said("assistant", ids))
        more.append({"calls": tuple(calls), "stop_reason": stop_reason})
        if results:
            said.append(Said("tool", (4, 5)))
            more.append({"results": tuple(results)})
    one = said_episode(said)
    turns = (replace(turn, **fields) for turn, fields in zip(one.turns, more, strict=True))
    return one.with_(turns=tuple(turns), **given)


OK = ToolResult("54.0")
CLEAN = episode(([call(expr="1+1")], [OK]), ([], []))


FAILED = ToolResult("SyntaxError", error="exception")
MALFORMED = ToolCall("c", "", None, "{oops", error="not JSON: line 1")


@pytest.mark.parametrize(
    ("made", "names", "turn", "evidence"),
    [
        (CLEAN, "", None, ""),
        (Episode("e", "t"), "", None, ""),
        (episode(([], [])), "NOTOOL", 0, "it answered without calling a tool"),
        (
            episode(
                ([call(a=1)], [ToolResult("a: expected\n, got 4,5", error="bad_arguments")]),
                ([call(a="2")], [OK]),
                ([], []),
            ),
            "BADARG",
            0,
            "calculator was called wrongly 1×: a: expected , got 4,5",
        ),
        (
            episode(
                ([call()], [ToolResult("?", error="unknown_tool")]),
                ([replace(call(), name="other")], [ToolResult("!", error="bad_arguments")]),
                ([call()], [OK]),
            ),
            "BADARG",
            0,
            "calculator was called wrongly 1×: ?",
        ),
        (CLEAN.with_(outcome=Outcome.TRUNCATED_TURNS), "TRUNC", 2, "it ran out of turns"),
        (
            episode(([call()], [OK]), stop_reason=StopReason.LENGTH),
            "TRUNC",
            0,
            "turn 0 was cut after 3 tokens",
        ),
        (
            episode(([call(a=1)], [FAILED]), ([], [])),
            "TOOLFAIL AFTERERR",
            0,
            "calculator failed 1×: SyntaxError",
        ),
        (
            episode(([call(a=1)], [FAILED]), ([call(a=2)], [OK]), ([], [])),
            "TOOLFAIL",
            0,
            "calculator failed 1×: SyntaxError",
        ),
        (
            episode(
                ([MALFORMED], [ToolResult("not JSON", error="malformed_call")]), ([call()], [OK])
            ),
            "MALFORMED",
            0,
            "not JSON: line 1",
        ),
        (
            CLEAN.with_(fact="skipped:drift"),
            "DRIFT",
            None,
            "a separator, role or stop token is missing",
        ),
    ],
)
def test_each_rule(made: Episode, names: str, turn: int | None, evidence: str) -> None:
    flags = find_flags(made, offered=True)
    assert " ".join(flag.name for flag in flags) == names
    assert not flags or (flags[0].turn == turn and flags[0].evidence.startswith(evidence))


@pytest.mark.parametrize(
    ("steps", "loops"),
    [
        ([([call(a=1)], [OK])] * 2, True),  # the same answer twice in a row
        ([([call(a=1)], [OK]), ([call(a=1)], [ToolResult("other")])], False),  # the world changed
        ([([call(a=1)], [OK]), ([call(a=2)], [OK])], False),
        (
            [([call(a=1)], [ToolResult(str(n))]) for n in range(3)],
            True,
        ),  # three times is too often anyway
        (
            [([call(a=1, b=2)], [OK]), ([call(b=2, a=1)], [OK])],
            True,
        ),  # the order of arguments does not matter
    ],
)
def test_loop_of_calls(steps: list[tuple[list[ToolCall], list[ToolResult]]], loops: bool) -> None:
    assert ("LOOP" in flag_names(episode(*steps, ([], [])))) is loops


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([9, *[1, 2, 3] * 12], (36, 3)),
        ([9, *[1, 2, 3] * 12, 0], (36, 3)),  # a stop token behind it
        ([1] * 31, (0, 0)),
        (range(500), (0, 0)),
        ([], (0, 0)),
    ],
)
def test_loop_of_tokens(ids: Sequence[int], found: tuple[int, int]) -> None:
    assert repetition(np.array(ids, np.int32)) == found
    assert flag_names(episode(([], []), ids=[5, *[1, 2] * 20])) == ("NOTOOL", "LOOP")


def test_drift_comes_from_outside_too() -> None:
    assert flag_names(CLEAN, drift=["resegmented"]) == ()
    assert flag_names(CLEAN, drift=["by_design", "structural"]) == ("DRIFT",)


def test_branches_are_read_one_by_one() -> None:
    asked, failed = [call(expr="1+1")], [ToolResult("no", error="timeout")]
    one, other = episode((asked, [OK]), (asked, [OK])), episode((asked, failed), ([], []))
    # the same call twice in a row is a loop, in two branches it is not; the failed one is answered in the second alone
    tree = grafted(episode((asked, [OK]), ([], [])), other, 1)
    assert flag_names(one) == ("LOOP",) and flag_names(tree) == ("TOOLFAIL", "AFTERERR")
    _, flag = find_flags(tree)
    assert flag.turn == 4 and tree.branches == ((0, 1, 2), (0, 3, 4))
    bad = grafted(tree, episode((asked, [ToolResult("?", error="bad_arguments")])), 1)
    assert find_flags(bad)[1].evidence == "calculator was called wrongly 1×: ?"


def test_mask_bugs() -> None:
    origin = CLEAN.tokens.origin.copy()
    origin[3] = Origin.MODEL  # a token of the tool's turn
    (flag,) = find_flags(CLEAN.with_(tokens=replace(CLEAN.tokens, origin=origin)))
    said = "1 tokens of a tool turn count as sampled"
    assert (flag.name, flag.evidence, flag.turn) == ("MASK", said, 1)
    bare = Tokens.from_ids([1, 2, 3], [Origin.MODEL] * 3)
    turn = Turn(0, "assistant", (), 0, 3, calls=(call(),))
    assert flag_names(Episode("e", "t", turns=(turn,), tokens=bare)) == ("MASK",)
