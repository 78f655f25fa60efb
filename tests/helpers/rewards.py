"""An episode, its task and what reward functions say of it."""

from collections.abc import Callable
from typing import Any

from agentrl_cli.rewards import Reward, RewardContext, score
from agentrl_cli.types import Episode, Origin, Task, Tokens, ToolResult, Turn

TASK = Task(
    "p/1",
    "p",
    "math",
    "train",
    ({"role": "user", "content": "2 + 3?"},),
    {"data_source": "gsm8k", "ground_truth": "5", "extra_info": {"index": 7}, "solution": "5"},
)


def episode() -> Episode:
    """Asked, called a tool, answered 5; ids 0…8, the model's own are 1, 2, 5 and 6."""
    origin = [
        Origin.USER,
        Origin.MODEL,
        Origin.MODEL,
        Origin.TOOL,
        Origin.TOOL,
        Origin.MODEL,
        Origin.MODEL,
    ]
    call: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    turns = (
        Turn(0, "user", tuple(TASK.prompt), 0, 1),
        Turn(1, "assistant", (said,), 1, 3),
        Turn(
            2,
            "tool",
            ({"role": "tool", "content": "5"},),
            3,
            5,
            results=(ToolResult("5", reward=0.25),),
        ),
        Turn(3, "assistant", ({"role": "assistant", "content": "It is 5."},), 5, 7),
    )
    return Episode("e", "p/1", turns=turns, tokens=Tokens.from_ids(range(7), origin), step=4)


def context(**changes: Any) -> RewardContext:
    plain = {"final_text": "It is 5.", "decode": lambda ids: " ".join(map(str, ids)), **changes}
    return RewardContext(TASK, **plain)


async def value(
    function: Callable[..., Any], ctx: RewardContext | None = None
) -> tuple[float, str]:
    (part,) = await score(episode(), [Reward("r", function)], ctx or context())
    return part.value, part.detail
