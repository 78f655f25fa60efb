"""Reward parts: numbers and texts of people's functions, and what must never become a zero."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from agentrl_cli.errors import EnvError, SandboxFault
from agentrl_cli.rewards import Reward, RewardContext, Scored, score
from agentrl_cli.sandbox import Limits
from agentrl_cli.types import Episode, RewardPart, Task

TASK = Task("t", "p", "f", "train", (), {"answer": "5"})
EPISODE = Episode("e", "t")


def context(**facts: Any) -> RewardContext:
    return RewardContext(TASK, "5", **facts)


def one(function: Any, weight: float = 1.0) -> list[Reward]:
    return [Reward("part", function, weight, True)]


async def test_functions_sync_and_async_in_order() -> None:
    async def slow(episode: Episode, ctx: RewardContext) -> float:
        return 0.25

    rewards = [
        Reward(
            "right",
            lambda episode, ctx: float(ctx.final_text == ctx.task.data["answer"]),
            2.0,
            True,
        ),
        Reward("slow", slow, 0.5),
        Reward("skipped", lambda episode, ctx: None),
        Reward("said", lambda episode, ctx: ctx.part(1, "one")),
        Reward("pair", lambda episode, ctx: (0.5, "half")),
        Reward("whole", lambda episode, ctx: RewardPart("own name", 3.0, 0.0)),
    ]
    parts = await score(EPISODE, rewards, context())
    assert parts == (
        RewardPart("right", 1.0, 2.0, True),
        RewardPart("slow", 0.25, 0.5),
        RewardPart("said", 1.0, 1.0, False, "one"),
        RewardPart("pair", 0.5, 1.0, False, "half"),
        RewardPart("own name", 3.0, 0.0),
    )
    graded = EPISODE.with_(reward_parts=parts)
    assert graded.reward == pytest.approx(2.0 + 0.125 + 1.0 + 0.5) and graded.primary == 1.0
    assert await score(EPISODE, [], context()) == ()


@pytest.mark.parametrize(
    "answer", [True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1), np.float64(1)]
)
async def test_booleans_and_the_numbers_of_numpy_count_as_numbers(answer: Any) -> None:
    (part,) = await score(EPISODE, one(lambda episode, ctx: answer), context())
    assert part.value == 1.0 and isinstance(part.value, float)
    (part,) = await score(EPISODE, one(lambda episode, ctx: ctx.part(answer, "why")), context())
    assert (part.value, part.detail) == (1.0, "why")


async def test_a_primary_part_stays_primary_whatever_the_function_makes_of_it() -> None:
    rewards = [Reward("right", lambda episode, ctx: RewardPart("right", 1.0), 1.0, True)]
    assert (await score(EPISODE, rewards, context()))[0].primary


@pytest.mark.parametrize(
    "answer",
    [
        "1.0",
        float("nan"),
        float("inf"),
        [1],
        {"value": 1},
        (None, "x"),
        RewardPart("part", float("nan")),
    ],
)
async def test_what_is_no_number_is_an_error_of_the_grader(answer: Any) -> None:
    with pytest.raises(EnvError, match="'part'"):
        await score(EPISODE, one(lambda episode, ctx: answer), context())


async def test_a_number_whose_text_would_end_the_process_is_an_error_of_the_grader() -> None:
    class Detail:
        def __str__(self) -> str:
            raise SystemExit(3)

    for answer in ((1.0, Detail()), 10**400):
        with pytest.raises(EnvError, match="'part' raised"):
            await score(EPISODE, one(lambda episode, ctx, answer=answer: answer), context())


async def test_a_function_that_raises_is_named() -> None:
    def broken(episode: Episode, ctx: RewardContext) -> float:
        return 1 / 0

    with pytest.raises(EnvError, match="'part' raised ZeroDivisionError") as caught:
        await score(EPISODE, one(broken), context())
    assert "neither scored nor trained" in caught.value.hint
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- the sandbox -----------------------------------------------------------------------------------------------------


class FaultySandbox:
    """A session, and the sandbox that it belongs to, which starts no further box."""

    limits, imports = Limits(), ()

    def __init__(self) -> None:
        self.sandbox, self.asked = self, list[dict[str, Any]]()

    async def session(self, **options: Any) -> None:
        self.asked.append(options)
        raise SandboxFault("No box could be started.")


async def test_grading_opens_a_box_with_the_sessions_limits() -> None:
    session, opened = FaultySandbox(), list[int]()

    async def open_session() -> FaultySandbox:
        opened.append(1)
        return session

    ctx = context(open_session=open_session)
    assert opened == []
    with pytest.raises(SandboxFault):
        await ctx.grade("def f(): ...", [{"call": "f", "args": [], "expect": None}], wall=2.0)
    assert opened == [1] and session.asked[0]["grading"] and session.asked[0]["wall"] == 2.0


async def test_a_fault_of_the_sandbox_is_not_a_failed_test() -> None:
    async def open_session() -> FaultySandbox:
        return FaultySandbox()

    async def tests(episode: Episode, ctx: RewardContext) -> float:
        return float((await ctx.grade("", [])).passed)

    with pytest.raises(SandboxFault):
        await score(EPISODE, one(tests), context(open_session=open_session))


async def test_a_run_without_a_sandbox_reports_it() -> None:
    with pytest.raises(EnvError, match="no sandbox"):
        await context().session()


def test_scored_has_a_text() -> None:
    assert Scored(1.0) == (1.0, "") and context().part(0.5, "why") == Scored(0.5, "why")
