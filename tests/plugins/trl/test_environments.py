"""TRL's environment classes and reward functions."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ConfigError, EnvError
from agentrl_cli.rewards import Reward, RewardContext, score
from agentrl_cli.rewards.adapt import adapt_reward
from agentrl_cli.tools.configured import load_tools
from agentrl_cli.types import Outcome, Task
from tests.helpers.packs import call, pack, play, row
from tests.helpers.rewards import TASK, context, episode, value
from tests.helpers.trees import episode as tree
from tests.helpers.trees import fork

TRL = '''
class Counter:
    """Written against https://huggingface.co/docs/trl/grpo_trainer (environment_factory)."""

    def reset(self, **kwargs) -> str | None:
        self.count = int(kwargs.get("start", 0))
        self.asked = kwargs["prompt"]
        return f"The counter is at {self.count}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: The amount to add.

        Returns:
            The new value.
        """
        self.count += step
        return self.count

    async def read(self) -> str:
        """Read the counter."""
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == 5)

    def close(self):
        CLOSED.append(self.count)

CLOSED = []
'''


async def test_trl_environments(tmp_path: Path) -> None:
    spec = {
        "tools": [{"environment": "task.py:Counter"}],
        "rewards": {"world": {"primary": True, "function": "environment"}},
    }
    made = pack(tmp_path, spec, [row(start=3)], task=TRL)
    assert [tool.name for tool in made.tools] == ["increment", "read"]
    done = await play(made, [call("increment", step=2) + call("read"), "done"])
    assert str(done.turns[0].messages[-1]["content"]) == "2 + 3?\n\nThe counter is at 3."
    assert [result.text for turn in done.turns for result in turn.results] == ["5", "now 5"]
    assert done.outcome is Outcome.SOLVED
    assert {part.name: part.value for part in done.reward_parts} == {
        "world": 1.0,
        "tool:increment": 1.0,
    }
    with pytest.raises(ConfigError, match="needs reset"):
        load_tools([{"environment": "pathlib:Path"}], tmp_path)
    assert made.module.CLOSED == [5]  # once, though two tools share it


async def test_trls_reward_functions() -> None:
    def accuracy(completions: Any, solution: list[str], **kwargs: Any) -> list[float]:
        assert kwargs["prompts"] == [list(TASK.prompt)] and kwargs["completion_ids"] == [
            [1, 2, 3, 4, 5, 6]
        ]
        assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
        assert kwargs["trainer_state"].global_step == 4 and kwargs["ground_truth"] == ["5"]
        kwargs["log_metric"]("seen", 1)
        return [float(solution[0] in completions[0][-1]["content"])]

    async def slow(completions: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [None]

    assert await value(accuracy) == (1.0, "seen 1")
    assert await score(episode(), [Reward("r", slow)], context()) == ()  # not applicable: no part
    with pytest.raises(EnvError, match="a list of one number"):
        await value(lambda completions: [1.0, 2.0])


async def test_the_conversation_is_the_one_that_the_agent_ended_with() -> None:
    one = tree(fork())
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **rest: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, ids=completion_ids)
        return [1.0]

    await adapt_reward(reward)(one, RewardContext(Task("t", "p", "f", "train", ()), ""))
    assert one.main.turns == (0, 1, 4, 5)
    said = [m["content"] for m in (*seen["prompts"][0], *seen["completions"][0])]
    assert said == ["turn 0", "turn 1", "turn 4", "turn 5"]
    assert seen["ids"] == [[20, 21, 31, 32, 25]], "tool results included, as TRL has it"
