"""What reward functions see of an episode whose turns branch."""

from __future__ import annotations

from agentrl_cli.rewards import RewardContext
from agentrl_cli.types import Task
from tests.helpers.trees import episode, fork, sub_agent

CONTEXT = RewardContext(Task("t", "p", "f", "train", ()), "")


def test_the_response_is_of_the_conversation_that_the_agent_ended_with() -> None:
    assert CONTEXT.response(episode(fork())) == "turn 1\nturn 4\nturn 5"


def test_a_second_agent_is_not_part_of_it() -> None:
    one = episode(sub_agent())
    assert one.main.turns == (0, 1, 4, 5) and CONTEXT.response(one) == "turn 1\nturn 4\nturn 5"
