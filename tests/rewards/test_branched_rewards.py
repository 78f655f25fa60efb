"""What reward functions see of an episode whose turns branch."""

from __future__ import annotations

from typing import Any

from agentrl_cli.compat.reward import adapted
from agentrl_cli.rewards import RewardContext
from agentrl_cli.types import Task
from tests.helpers.trees import episode, fork, sub_agent

CONTEXT = RewardContext(Task("t", "p", "f", "train", ()), "")


async def test_the_conversation_is_the_one_that_the_agent_ended_with() -> None:
    one = episode(fork())
    seen: dict[str, Any] = {}

    def trl(prompts: Any, completions: Any, completion_ids: Any, **rest: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, ids=completion_ids)
        return [1.0]

    def verl(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> float:
        seen["solution"] = solution_str
        return 1.0

    for function in (trl, verl):
        await adapted(function)(one, CONTEXT)
    assert one.main.turns == (0, 1, 4, 5) and seen["solution"] == "turn 1\nturn 4\nturn 5"
    assert [m["content"] for m in (*seen["prompts"][0], *seen["completions"][0])] == [
        "turn 0",
        "turn 1",
        "turn 4",
        "turn 5",
    ]
    assert seen["ids"] == [[20, 21, 31, 32, 25]]  # tool results included, as TRL has it


def test_a_second_agent_is_not_part_of_it() -> None:
    one = episode(sub_agent())
    assert one.main.turns == (0, 1, 4, 5) and CONTEXT.response(one) == "turn 1\nturn 4\nturn 5"
