"""verl's reward functions: compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs).

They return a number, or {"score": …} whose other entries are shown with the part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl_cli.errors import EnvError
from agentrl_cli.hooks.threads import call
from agentrl_cli.rewards.adapt import Parameters, accept_arguments
from agentrl_cli.rewards.context import RewardContext
from agentrl_cli.types import Episode


def adapt_reward(
    function: Callable[..., Any], parameters: Parameters, extra: dict[str, Any]
) -> Any:
    """Return the function as one of (episode, ctx); None if it does not have verl's parameters."""
    if not set(parameters) >= {"solution_str", "ground_truth"}:
        return None

    async def reward(episode: Episode, ctx: RewardContext) -> Any:
        data = ctx.task.data
        if (data.get("reward_model") or {}).get(
            "style"
        ) == "model":  # a reward model scores this row, not a rule
            return None
        rewards = [
            result.reward
            for turn in episode.turns
            for result in turn.results
            if result.reward is not None
        ]
        info = {
            **(data.get("extra_info") or {}),
            "num_turns": len(episode.turns),
            "rollout_reward_scores": rewards,
        }
        given = {
            "data_source": data.get("data_source") or episode.family,
            "solution_str": ctx.response(episode),
            "ground_truth": data.get("ground_truth", data.get("answer")),
            "extra_info": info,
            **extra,
        }
        return _answer(await call(function, **accept_arguments(given, parameters)))

    return reward


def _answer(answer: Any) -> Any:
    if not isinstance(answer, Mapping):
        return answer
    if "score" not in answer:
        raise EnvError(f"The reward function returned {sorted(answer)}; a mapping needs `score`.")
    return answer["score"], ", ".join(
        f"{key} {value}" for key, value in answer.items() if key != "score"
    )
