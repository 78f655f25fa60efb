"""Each rule with an episode that has it and one that has not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl_cli.rollout.flags import find_flags, flag_names, repetition
from agentrl_cli.types import (
    Episode,
    Generation,
    Origin,
    Outcome,
    StopReason,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)
from tests.helpers.trees import grafted


def sampled(ids: list[int]) -> Tokens:
    n = len(ids)
    column = np.full(n, -0.5, np.float32)
    top = np.zeros((n, 5), np.int32)
    return Tokens.from_generation(
        Generation(
            np.array(ids, np.int32),
            column,
            column,
            column,
            top,
            top.astype(np.float32),
            StopReason.STOP,
            "",
        )
    )


def call(**arguments: Any) -> ToolCall:
    return ToolCall("c", "calculator", arguments, str(arguments))


def episode(
    *steps: tuple[list[ToolCall], list[ToolResult]], ids: list[int] | None = None, **given: Any
) -> Episode:
    turns: list[Turn] = []
    spans: list[Tokens] = []
    end = 0
    reason = given.pop("stop_reason", StopReason.STOP)
    for calls, results in steps:
        tokens = sampled(ids or [1, 2, 3])
        stop = end + len(tokens)
        turns.append(
            Turn(len(turns), "assistant", (), end, stop, calls=tuple(calls), stop_reason=reason)
        )
        spans.append(tokens)
        end = stop
        if results:
            turns.append(Turn(len(turns), "tool", (), end, end + 2, results=tuple(results)))
            spans.append(Tokens.from_ids([4, 5], [Origin.TOOL] * 2))
            end += 2
    return Episode(
        "e", "t", turns=tuple(turns), tokens=Tokens.concat(spans), outcome=Outcome.FAILED
    ).with_(**given)


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
    flags = find_flags(made)
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


def test_loop_of_tokens() -> None:
    assert repetition(np.array([9, *[1, 2, 3] * 12], np.int32)) == (36, 3)
    assert repetition(np.array([9, *[1, 2, 3] * 12, 0], np.int32)) == (
        36,
        3,
    )  # a stop token behind it
    assert repetition(np.array([1] * 31, np.int32)) == (0, 0)
    assert repetition(np.arange(500, dtype=np.int32)) == (0, 0)
    assert repetition(np.array([], np.int32)) == (0, 0)
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
    assert (flag.name, flag.evidence, flag.turn) == (
        "MASK",
        "1 tokens of a tool turn count as sampled",
        1,
    )
    bare = Tokens.from_ids([1, 2, 3], [Origin.MODEL] * 3)
    turn = Turn(0, "assistant", (), 0, 3, calls=(call(),))
    assert flag_names(Episode("e", "t", turns=(turn,), tokens=bare)) == ("MASK",)
